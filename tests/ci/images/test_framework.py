"""With an engine that builds nothing."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from images import framework
from images.cli import CONTAINERFILE
from images.engine import Build, Podman

ARGUMENTS = {"BASE_IMAGE": "debian:12", "ENV_ARCH": "x86_64", "PACKAGES": "tini"}


@dataclass(frozen=True)
class Fake(Podman):
    """An engine that notes what it is to build, and the images that are `here`."""

    built: list[str] = field(default_factory=list)
    here: dict[str, str] = field(default_factory=lambda: {"debian:12": "d12"})

    def image_id(self, name: str) -> str | None:
        return self.here.get(name)

    def build(self, build: Build, *, layers: bool = True) -> str:
        self.built.append(build.containerfile.read_text().splitlines()[0])
        return "whole"

    def build_stage(self, target: str, build: Build) -> str:
        made = f"{target}{len(self.here)}"
        self.here[made] = made
        self.built.append(target)
        return made


class Daemon(Fake):
    """One that keeps stages, as docker's does."""

    keeps_stages = True


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A context that was laid out."""
    folder = tmp_path / "toy/context"
    folder.mkdir(parents=True)
    (folder / "framework.lock").write_text("numpy 1\n")
    return folder


def build(chosen: Fake, context: Path, *, cache: bool = True, packages: str = "tini") -> list[str]:
    """What is built: "framework" for that stage, and of the whole its Containerfile's first line."""
    chosen.built.clear()
    arguments = ARGUMENTS | {"PACKAGES": packages, "REVISION": str(len(chosen.here))}  # the last is of the whole alone
    wanted = Build(CONTAINERFILE, context, "toy:1", arguments, network=True, cache=cache)
    assert framework.build(wanted, chosen) == "whole"
    return list(chosen.built)


def test_the_framework_is_built_once_and_again_only_where_it_or_what_is_below_it_changed(context: Path) -> None:
    chosen = Fake("")
    assert build(chosen, context) == ["framework", "FROM framework1"]
    assert build(chosen, context) == ["FROM framework1"]
    (context / "framework.lock").write_text("numpy 2\n")
    assert build(chosen, context) == ["framework", "FROM framework2"]
    chosen.here["debian:12"] = "another"
    assert build(chosen, context) == ["framework", "FROM framework3"]
    del chosen.here["framework3"]  # `podman image prune`
    assert build(chosen, context) == ["framework", "FROM framework3"]
    assert build(chosen, context, packages="tini libffi8") == ["framework", "FROM framework4"]
    assert build(chosen, context, packages="tini libffi8", cache=False) == ["framework", "FROM framework5"]


def test_docker_keeps_what_it_built_by_itself(context: Path) -> None:
    whole = CONTAINERFILE.read_text().splitlines()[0]
    assert build(Daemon(""), context) == [whole]
