"""Machines that are described and not measured, so that users can compare with machines they do not own.

They lie in `machines/` in the format of `lms link measure -o`. A link's `ceiling` is its nominal rate, its series are
published measurements, if there are any, and each figure has its source. Names that DDL's own catalogue also has mean
the same machines.
"""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path

from lms import documents
from lms.errors import UsageError
from lms.link.profile import Profile

_FOLDER = files("lms.link") / "machines"


def names() -> list[str]:
    """Their names, sorted."""
    return sorted(entry.name.removesuffix(".json") for entry in _FOLDER.iterdir() if entry.name.endswith(".json"))


def machine(name: str) -> Profile:
    """The described machine of that name. Raises UsageError that lists what there is."""
    entry = _FOLDER / f"{name}.json"
    if not entry.is_file():
        raise UsageError(f"{name!r}: expected one of {', '.join(names())}")
    return Profile.from_dict(json.loads(entry.read_text()), f"machine {name}")


def load(text: str) -> Profile:
    """The profile that `text` names: a file that `lms link measure -o` wrote, or a described machine.

    Raises UsageError for neither, for another format, and for a file that is truncated.
    """
    if text in names() and not os.path.exists(text):
        return machine(text)
    try:
        content = Path(text).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise UsageError(
            f"{text!r}: {why}; expected a file that `lms link measure -o` wrote, or one of {', '.join(names())}"
        ) from None
    try:
        document = documents.parse(content)
    except ValueError as error:
        raise UsageError(
            f"{text!r}: truncated or no JSON ({error}); measure again with `lms link measure -o FILE.json`"
        ) from None
    if not isinstance(document, dict):
        raise UsageError(f"{text!r}: expected what `lms link measure -o` wrote, found a {type(document).__name__}")
    from lms.link import ddl_bench

    if ddl_bench.is_one(document):
        return ddl_bench.profile(document, text)
    return Profile.from_dict(document, repr(text))
