"""The Containerfile in other forms: with its arguments filled in, and in two halves. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

STAGE = "framework"  # what is the same from commit to commit


def filled(text: str, arguments: Mapping[str, str]) -> str:
    """`text`, in which each of `arguments` is the default of the ARG of its name: `podman build` then needs no other.

    Only the first ARG of a name takes it: FROM's own is declared again, to inherit it.
    """
    for name, value in arguments.items():
        quoted = re.sub(r'([\\"$])', r"\\\1", value)
        if found := re.search(rf"^ARG {name}(=.*)?$", text, re.MULTILINE):
            text = f'{text[: found.start()]}ARG {name}="{quoted}"{text[found.end() :]}'
    return text


def halves(text: str) -> tuple[str, str]:
    """What makes the stage, and what goes on from it, without the line FROM."""
    first, _, second = text.partition(f"\nFROM {STAGE}\n")
    return first + "\n", second
