"""The command line, with an environment that is not solved and an engine that builds nothing."""

import subprocess
from pathlib import Path

import pytest

from bundle import base
from bundle.errors import BundleError
from images import cli, engine
from images.engine import Engine
from images.environment import Environment
from images.names import Description

DESCRIBED = Description("toy", "localhost/bascule-toy", "1-cpu-py311", "bascule-toy", "as each licence allows")


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A context that was laid out."""
    folder = tmp_path / "toy/context"
    folder.mkdir(parents=True)
    return folder


def test_a_context_for_elsewhere_has_all_arguments_in_its_containerfile(
    context: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = Environment("toy", (), frozenset())
    cli.complete(DESCRIBED, context, cli.arguments(DESCRIBED, toy, "ubuntu:24.04"))
    assert 'ARG BASE_IMAGE="ubuntu:24.04"' in (context / "Containerfile").read_text()
    assert "podman build --format docker --tag localhost/bascule-toy:1-cpu-py311 " in capsys.readouterr().err
    with pytest.raises(BundleError, match="BASE_IMAGE=mmdebstrap: whoever builds from a context fetches its base"):
        cli.complete(DESCRIBED, context, cli.arguments(DESCRIBED, toy, "mmdebstrap"))


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


def test_the_exit_status_and_the_error_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path))
    assert cli.main(["base", "--engine", "kaniko", *out]) == 1
    assert capsys.readouterr().err == "images: error: engine 'kaniko': expected docker or podman\n"
    monkeypatch.setattr(base, "unreachable", lambda name: "no route")
    assert cli.main(["base", "--context-only", *out]) == 1  # it makes the channel that it needs
    assert "conda-forge does not answer: no route" in capsys.readouterr().err

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
