"""Which licences need care before an environment is used for a product or passed on, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bascule.inventory import Package

# The package itself, where what it says of its licence is not all. Sources: the licence files of these packages.
_BY_NAME = {
    "snapml": (
        "International License Agreement for Non-Warranted Programs (IBM): not to be passed on; it is installed by "
        "your own pip step"
    ),
    "cudatoolkit": "NVIDIA's CUDA EULA: passed on only as part of a program",
    "cudnn": "NVIDIA's cuDNN licence: passed on only as part of a program",
    "mkl": "Intel Simplified Software License: free of charge, not open",
}
_NVIDIAS = (
    "nvidia-", "cuda-", "libnv", "libcublas", "libcudnn", "libcufft", "libcufile", "libcupti", "libcurand",
    "libcusolver", "libcusparse",
)  # fmt: skip
# Some of what their names begin with is open all the same (nvidia-ml-py), and says so.
_OPEN = re.compile(r"(?:MIT|0?BSD|Apache)\b[^()]*|ISC|MPL-2\.0|Zlib", re.I)
_SAYS_NOTHING = re.compile(
    r"|unknown|none|other|(?:see |the )*(?:licen[cs]e|copying)(?: file)?(?:\.(?:txt|md|rst))?", re.I
)
# Otherwise by what it says, each part of an expression for itself. The first that fits holds.
_BETWEEN_PARTS = re.compile(r"(\bAND\b|\bOR\b|[()])")
_KNOWN_TO_BE_OPEN = "OpenMPI|MPICH|Public-?Domain"
_BY_LICENSE = (
    (re.compile(r"\bAGPL", re.I), "AGPL: whoever uses it over a network may ask for the source"),
    (re.compile(r"(?<!L)\bGPL[- v]?[23].*exception", re.I), None),
    (re.compile(r"(?<![AL])\bGPL|(?<!Lesser )General Public License", re.I),
     "GPL: a program that contains it and is passed on is under the GPL"),
    (re.compile(r"EULA|propriet|commercial|nvidia|cuda|\bIBM\b|non-warranted|Intel-?Simplified", re.I),
     "not an open licence: read it before you pass the environment on"),
    (re.compile(r"\bBUSL|\bSSPL|-NC-|\bElastic-"),
     "not an open licence: read it before you pass the environment on"),
    (re.compile(r"\bLGPL|Lesser General Public", re.I), None),
    (re.compile(rf"\bLicenseRef-(?!(?:{_KNOWN_TO_BE_OPEN})\b)", re.I),
     "a licence of its own, which is not known here: look into the package"),
)  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """A package with what is to be minded; "" where nothing is."""

    package: Package
    care: str


def judge(package: Package) -> Judged:
    """What is to be minded about a package's licence. A rule of thumb, no legal advice."""
    name = package.name.lower()
    if name in _BY_NAME:
        return Judged(package, _BY_NAME[name])
    said = package.license.strip()
    if name.startswith(_NVIDIAS) and not (name.startswith("nvidia-") and _OPEN.fullmatch(said)):
        return Judged(package, _BY_NAME["cudatoolkit"])
    if _SAYS_NOTHING.fullmatch(said):
        return Judged(package, "it does not say: look into the package")
    words = [word.strip() for word in _BETWEEN_PARTS.split(said) if word.strip()]
    words.reverse()
    cares = []
    while words:
        cares.append(_of_alternatives(words))
        if words:  # a closing bracket too many: not every licence is an expression
            words.pop()
    return Judged(package, next(filter(None, cares), ""))


def _of_alternatives(words: list[str]) -> str:
    """What is to be minded where each alternative needs some care; `words`, the last first, lose what was read."""
    cares = [_of_parts(words)]
    while words and words[-1] == "OR":
        words.pop()
        cares.append(_of_parts(words))
    return cares[0] if all(cares) else ""


def _of_parts(words: list[str]) -> str:
    """What is to be minded of parts that hold together, up to an OR or the closing bracket; `words` as above."""
    cares = []
    while words and words[-1] not in ("OR", ")"):
        word = words.pop()
        if word == "(":
            cares.append(_of_alternatives(words))
            if words:
                words.pop()
        elif word != "AND":
            cares.append(_care_of(word))
    return next(filter(None, cares), "")


def _care_of(license_: str) -> str:
    return next((care or "" for pattern, care in _BY_LICENSE if pattern.search(license_)), "")
