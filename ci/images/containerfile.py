"""The Containerfile in other forms: with its arguments filled in, and in two halves. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping


def filled(text: str, arguments: Mapping[str, str]) -> str:
    """`text`, in which each of `arguments` is the default of the ARG of its name: `podman build` then needs no other.

    Raises KeyError where there is no such ARG. Only the first of a name takes it: FROM's own is declared again, to
    inherit it.
    """
    for name, value in arguments.items():
        found = re.search(rf"^ARG {name}(=.*)?$", text, re.MULTILINE)
        if not found:
            raise KeyError(name)
        quoted = re.sub(r'([\\"$])', r"\\\1", value)
        text = f'{text[: found.start()]}ARG {name}="{quoted}"{text[found.end() :]}'
    return text


def halves(text: str, stage: str) -> tuple[str, str]:
    """What makes the stage `stage`, and what goes on from it, without the line FROM.

    Raises ValueError where no later stage begins with it.
    """
    first, line, second = text.partition(f"\nFROM {stage}\n")
    if not line:
        raise ValueError(f"no stage of the Containerfile begins with {stage!r}")
    return first + "\n", second
