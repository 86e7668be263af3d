"""Whether an installed package fits what another asks for, by conda's rules for a version and a build.

Source: conda's documentation, "Package match specifications", of which this is what recipes use.
"""

from __future__ import annotations

import operator
import re
from fnmatch import fnmatchcase
from itertools import zip_longest

_CLAUSE = re.compile(r"(==|!=|>=|<=|>|<|=)?\s*([\w.+]+?(?:\.\*)?|\*)")  # without epochs, and ~=
_ORDERS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_ZERO = (1, 0, "")  # what a version has where it ends: 1.0 is 1


def fits(pin: str, version: str, build: str) -> bool:
    """Whether `version` and `build` are what `pin` asks for: what follows a name, "" for all.

    Raises ValueError where the pin is in another form.
    """
    versions, _, builds = pin.strip().partition(" ")
    if not fnmatchcase(build, builds.strip() or "*"):
        return False
    return any(all(_holds(clause, version) for clause in one.split(",")) for one in (versions or "*").split("|"))


def _holds(clause: str, version: str) -> bool:
    found = _CLAUSE.fullmatch(clause.strip())
    if found is None:
        raise ValueError(f"{clause!r} is no pin that is understood here")
    sign, asked = found[1] or "==", found[2]
    stem = asked.rstrip("*").rstrip(".")
    if sign in _ORDERS:
        pairs = list(zip_longest(_parts(version), _parts(stem), fillvalue=_ZERO))
        return bool(_ORDERS[sign]([one for one, _ in pairs], [other for _, other in pairs]))
    if asked.endswith("*") or sign == "=":  # all versions that begin so
        wanted = _parts(stem)
        same = _parts(version)[: len(wanted)] == wanted
    else:
        same = all(one == other for one, other in zip_longest(_parts(version), _parts(stem), fillvalue=_ZERO))
    return same != (sign == "!=")


def _parts(version: str) -> list[tuple[int, int, str]]:
    """In their order: words (rc, dev) before numbers, `post` after them; a local part (+cpu) is not looked at."""
    words = re.findall(r"\d+|[a-z]+", version.lower().partition("+")[0])
    return [(1, int(one), "") if one.isdigit() else (2 if one == "post" else 0, 0, one) for one in words]
