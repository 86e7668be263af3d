"""The command line, with an environment that is not solved and an engine that builds nothing."""

import argparse
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bundle import base
from bundle.errors import SolveError
from bundle.folders import Folders
from images import cli, engine
from images.engine import Build, Engine
from images.names import Description

DESCRIBED = Description("toy", "localhost/bascule-toy", "1-cpu-py311", "bascule-toy", "as each licence allows")


@dataclass(frozen=True)
class Fake(Engine):
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


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A context that was laid out."""
    folder = tmp_path / "toy/context"
    folder.mkdir(parents=True)
    (folder / "framework.lock").write_text("numpy 1\n")
    return folder


def build(chosen: Fake, context: Path, *, cache: bool = True) -> list[str]:
    """What is built: "framework" for that stage, and of the whole its Containerfile's first line."""
    chosen.built.clear()
    assert cli._build(DESCRIBED, context, "debian:12", chosen, network=True, cache=cache) == "whole"
    return list(chosen.built)


def test_the_framework_is_built_once_and_again_only_where_it_or_what_is_below_it_changed(context: Path) -> None:
    chosen = Fake("podman", "")
    assert build(chosen, context) == ["framework", "FROM framework1"]
    assert build(chosen, context) == ["FROM framework1"]
    (context / "framework.lock").write_text("numpy 2\n")
    assert build(chosen, context) == ["framework", "FROM framework2"]
    chosen.here["debian:12"] = "another"
    assert build(chosen, context) == ["framework", "FROM framework3"]
    del chosen.here["framework3"]  # `podman image prune`
    assert build(chosen, context) == ["framework", "FROM framework3"]
    assert build(chosen, context, cache=False) == ["framework", "FROM framework4"]


def test_docker_keeps_what_it_built_by_itself(context: Path) -> None:
    whole = cli.CONTAINERFILE.read_text().splitlines()[0]
    assert build(Fake("docker", ""), context) == [whole]


def test_a_context_for_elsewhere_has_all_arguments_in_its_containerfile(
    context: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli._tell_how(DESCRIBED, context, "ubuntu:24.04")
    assert 'ARG BASE_IMAGE="ubuntu:24.04"' in (context / "Containerfile").read_text()
    assert "podman build --format docker --tag localhost/bascule-toy:1-cpu-py311 " in capsys.readouterr().err
    with pytest.raises(cli.ImageError, match="BASE_IMAGE=mmdebstrap: whoever builds from a context fetches its base"):
        cli._tell_how(DESCRIBED, context, "mmdebstrap")


def test_the_revision_is_the_commit_and_unknown_outside_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_TREE", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert cli._revision() == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example"]
    subprocess.run([*git, "init", "--quiet"], check=True, capture_output=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "x"], check=True, capture_output=True)
    assert len(cli._revision()) == 12
    # As in a container, where root's repository is not the user's.
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert len(cli._revision()) == 12
    monkeypatch.setenv("PATH", "")
    assert cli._revision() == "unknown"


@pytest.mark.parametrize(("below", "told"), [("stand-in", True), ("conda-forge", False)])
def test_a_framework_that_the_stand_in_lacks_is_an_error_that_says_how_to_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str, told: bool
) -> None:
    def solve(specs: object, channels: object) -> None:
        raise SolveError("no set of packages has tensorflow")

    monkeypatch.setattr(cli.install, "solve", solve)
    where = Folders(cli._TREE, tmp_path)
    where.work.mkdir()
    base.remember(base.Base(below, (tmp_path.as_uri(),), ""), where)
    with pytest.raises(SolveError, match="no set of packages has tensorflow") as caught:
        cli.solve("tensorflow", argparse.Namespace(base=None), where)
    assert ('make channel FRAMEWORKS="pytorch tensorflow"' in str(caught.value)) == told


def test_the_exit_status_and_the_error_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path))
    assert cli.main(["base", "--engine", "kaniko", *out]) == 1
    assert capsys.readouterr().err == "images: error: engine 'kaniko': expected docker, podman, buildah\n"
    assert cli.main(["base", "--context-only", *out]) == 1
    assert "run `make channel` first" in capsys.readouterr().err

    def full(asked: str | None) -> Engine:
        raise OSError(28, "No space left on device")  # with no file's name

    monkeypatch.setattr(engine, "choose", full)
    assert cli.main(["base", *out]) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert "None" not in said
    with pytest.raises(SystemExit) as wrong:
        cli.main([])
    assert wrong.value.code == 2
