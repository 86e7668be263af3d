"""The engines' names on PATH are scripts here, which note what they are asked for."""

from pathlib import Path
from typing import Any

import pytest

from bundle.errors import BundleError
from images import cli, engine
from images.engine import Engine

ARGUMENTS = {"BASE_IMAGE": "debian:12", "ENV_ARCH": "x86_64", "PACKAGES": "tini", "REVISION": "1"}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH on which only what a test puts there is found; `log` there holds the calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def put(folder: Path, name: str, script: str = "") -> None:
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "$0 $*" >>{folder}/log\n{script}\n')
    path.chmod(0o755)


def calls(folder: Path) -> list[str]:
    return (folder / "log").read_text().replace(f"{folder}/", "").splitlines()


def build(name: str, **more: Any) -> str:
    return Engine(name).build(Path("F"), Path("context"), "tag", {"A": "b c"}, **more)


def test_a_docker_without_its_daemon_gives_way_to_podman_which_is_said(programs: Path) -> None:
    put(programs, "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    put(programs, "podman")
    chosen = engine.choose(None)
    assert chosen.name == "podman"
    assert "Cannot connect to the Docker daemon" in chosen.reason


def test_podman_under_dockers_name_is_not_taken_for_docker(programs: Path) -> None:
    put(programs, "docker", "echo 'podman version 4.9.4'")
    put(programs, "podman")
    assert engine.choose(None).name == "podman"
    with pytest.raises(BundleError, match="docker: it is podman under docker's name: ENGINE=podman"):
        engine.choose("docker")


def test_an_engine_that_is_asked_for_is_taken_or_refused_and_never_replaced(programs: Path) -> None:
    with pytest.raises(BundleError, match=r"docker: not installed; podman: not installed\): install"):
        engine.choose(None)
    put(programs, "podman")
    assert engine.choose("podman").reason == "asked for"
    with pytest.raises(BundleError, match="docker: not installed"):
        engine.choose("docker")
    with pytest.raises(BundleError, match="'kaniko': expected docker or podman"):
        engine.choose("kaniko")


@pytest.mark.parametrize("name", [engine.DOCKER, engine.PODMAN])
def test_a_build_gets_its_arguments_and_no_network_if_it_needs_none(programs: Path, name: str) -> None:
    put(programs, name, "[ $1 = build ] || echo sha256:0123")
    assert build(name, network=False) == "0123"
    (call,) = [call for call in calls(programs) if call.startswith(f"{name} build")]
    assert "--build-arg A=b c" in call
    assert "--tag tag" in call
    assert "--network none context" in call
    assert ("--timestamp" in call) == (name == "podman")


# What the end of a build that fails looks like: docker's BuildKit puts the step and the seconds before each line, and
# says at the end again what failed, with the part of the Containerfile that it is in.
BUILDKIT = """\
#6 [framework 2/3] RUN set -eu;     found=$(uname -m);     if ...
#6 0.301 bascule: the base image has no glibc
#6 ERROR: process "/bin/sh -c set -eu; ..." did not complete successfully: exit code: 1
""" + "".join(f'  {number} | >>>         echo "bascule: line {number}" >&2; exit 1; \\\n' for number in range(21, 44))
OWN_WORDS = "bascule: the base image has no glibc\n"
FAILURES = [
    ("docker", BUILDKIT + "ERROR: failed to solve: process ... did not complete successfully: exit code: 1\n", 2),
    ("docker", f"Step 5/9 : RUN set -eu;\n\x1b[91m{OWN_WORDS}\x1b[0mThe command returned a non-zero code: 1\n", 1),
    ("podman", f"{OWN_WORDS}Error: building at STEP: exit status 1\n", 2),
]


@pytest.mark.parametrize(("name", "said", "stream"), FAILURES, ids=["buildkit", "docker", "podman"])
def test_the_containerfiles_own_words_are_the_error(programs: Path, name: str, said: str, stream: int) -> None:
    (programs / "said").write_text(said)
    put(programs, name, f'while read -r line; do echo "$line"; done <{programs}/said >&{stream}; exit 1')
    with pytest.raises(BundleError, match=r"^tag: the base image has no glibc$"):
        build(name)


def test_any_other_failure_shows_the_engines_last_words(programs: Path) -> None:
    put(programs, "podman", "echo 'no space left on device' >&2; exit 125")
    with pytest.raises(BundleError, match="podman build failed with status 125:\nno space left on device"):
        build("podman")


def test_a_docker_that_keeps_what_it_built_to_itself_is_an_error_that_says_what_to_do(programs: Path) -> None:
    put(programs, "docker", "[ $1 = build ]")
    with pytest.raises(BundleError, match=r"built tag and does not find it.*docker buildx use default"):
        build("docker")


def test_a_base_image_for_another_processor_is_refused(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    put(programs, "podman", "echo arm64")
    with pytest.raises(BundleError, match=r"BASE_IMAGE debian:12 is for arm64.*amd64"):
        Engine("podman").check_architecture("debian:12")
    put(programs, "podman", "echo amd64")
    Engine("podman").check_architecture("debian:12")


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A context that was laid out."""
    folder = tmp_path / "toy/context"
    folder.mkdir(parents=True)
    (folder / "framework.lock").write_text("numpy 1\n")
    return folder


def stages(programs: Path, context: Path, name: str, *options: str) -> list[bool]:
    """Of each build, whether it is of the framework alone."""
    (programs / "log").write_text("")
    cli.build(Engine(name), context, "toy:1", ARGUMENTS, *options, network=True)
    return ["--target framework" in call for call in calls(programs) if " build " in call]


def test_podman_builds_the_framework_once_and_again_if_it_or_what_is_below_it_changed(
    programs: Path, context: Path
) -> None:
    # An image is here if it was built, and the base.
    remembers = f"""case $1 in
build) for word; do [ "$last" != --tag ] || : >{programs}/"${{word##*[:/]}}"; last=$word; done;;
*) last=; for word; do last=$word; done; [ -e {programs}/"${{last##*[:/]}}" ] && echo sha256:0123 || exit 1;;
esac"""
    put(programs, "podman", remembers)
    (programs / "12").touch()
    assert stages(programs, context, "podman") == [True, False]
    assert stages(programs, context, "podman") == [False]
    assert stages(programs, context, "podman", "--no-cache") == [True, False]
    (context / "framework.lock").write_text("numpy 2\n")
    assert stages(programs, context, "podman") == [True, False]
    assert (context.parent / "Containerfile").read_text().startswith("FROM localhost/bascule-framework:")


def test_docker_finds_the_frameworks_layer_by_itself(programs: Path, context: Path) -> None:
    put(programs, "docker", "[ $1 = build ] || echo sha256:0123")
    assert stages(programs, context, "docker") == [False]
