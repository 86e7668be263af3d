"""The Containerfile with its arguments filled in, so that `podman build CONTEXT` needs nothing else. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping


def filled(text: str, arguments: Mapping[str, str]) -> str:
    """`text`, in which each of `arguments` is the default of the ARG of its name. Raises KeyError where there is none.

    Only the first ARG of a name takes it: FROM's own is declared again after FROM, to inherit it.
    """
    for name, value in arguments.items():
        found = re.search(rf"^ARG {name}(=.*)?$", text, re.MULTILINE)
        if not found:
            raise KeyError(name)
        quoted = re.sub(r'([\\"$])', r"\\\1", value)
        text = f'{text[: found.start()]}ARG {name}="{quoted}"{text[found.end() :]}'
    return text
