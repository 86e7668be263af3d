"""What an image is called, and what its labels say. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from bundle.errors import BundleError

REGISTRY = "localhost"  # where engines look for what was never pushed


@dataclass(frozen=True)
class Package:
    """A package of an environment: its name, version and build."""

    name: str
    version: str
    build: str


@dataclass(frozen=True)
class Description:
    """An image's name and labels."""

    environment: str
    name: str
    tag: str
    title: str
    redistribution: str

    @property
    def reference(self) -> str:
        """NAME:TAG."""
        return f"{self.name}:{self.tag}"


def describe(environment: str, packages: Iterable[Package], pip: Iterable[str]) -> Description:
    """The description of an environment's image.

    `pip` are the requirements of its own pip step: only what may not be passed on is installed so. Raises BundleError
    if the environment has no python or no bascule-lms.
    """
    by_name = {package.name: package for package in packages}
    if missing := {"python", "bascule-lms"} - by_name.keys():
        raise BundleError(
            f"environment {environment!r} has no {' and no '.join(sorted(missing))}, after whose version its image is "
            f"named: add it to envs/{environment}.yaml"
        )
    python = "py" + "".join(by_name["python"].version.split(".")[:2])
    restricted = [re.split(r"[ =<>!~\[]", requirement)[0] for requirement in pip]
    return Description(
        environment=environment,
        name=f"{REGISTRY}/bascule-{environment}",
        tag=f"{by_name['bascule-lms'].version}-{_accelerator(by_name)}-{python}",
        title=f"bascule-{environment}",
        redistribution=(
            f"forbidden: {', '.join(restricted)} is under a licence that does not allow it; build it where it is used"
            if restricted
            else "as each package's licence allows"
        ),
    )


def _accelerator(packages: dict[str, Package]) -> str:
    """cuda12.9 or cpu, as the environment's packages say."""
    if "cuda-version" in packages:
        return f"cuda{packages['cuda-version'].version}"
    for name in ("pytorch", "tensorflow"):
        if found := re.search(r"cuda_?(\d+)", packages[name].build if name in packages else ""):
            return f"cuda{found[1]}"
    return "cpu"
