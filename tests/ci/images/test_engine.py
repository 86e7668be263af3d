"""The engines' names on PATH are scripts here, which note what they are asked for."""

import json
from pathlib import Path

import pytest

from images import engine
from images.errors import ImageError


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


def test_a_docker_without_its_daemon_gives_way_to_podman_which_is_said(programs: Path) -> None:
    put(programs, "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    put(programs, "podman")
    chosen = engine.choose(None)
    assert chosen.name == "podman"
    assert "Cannot connect to the Docker daemon" in chosen.reason


def test_without_any_engine_the_error_says_what_each_lacks_and_what_to_install(programs: Path) -> None:
    with pytest.raises(ImageError, match=r"docker: not installed; podman: not installed; buildah: not .*: install"):
        engine.choose(None)


def test_an_engine_that_is_asked_for_is_taken_or_refused_and_never_replaced(programs: Path) -> None:
    put(programs, "podman")
    assert engine.choose("podman").reason == "asked for"
    with pytest.raises(ImageError, match="buildah: not installed"):
        engine.choose("buildah")
    with pytest.raises(ImageError, match="'kaniko': expected docker, podman, buildah"):
        engine.choose("kaniko")


@pytest.mark.parametrize("name", engine.NAMES)
def test_a_build_gets_its_arguments_and_no_network_where_it_needs_none(programs: Path, name: str) -> None:
    config: dict[str, object] = dict.fromkeys(("architecture", "os", "created", "Architecture", "Os", "Created"), "x")
    config |= {"config": {}, "Config": {}, "history": [], "History": []}
    config |= {"rootfs": {"diff_ids": []}, "RootFS": {"Layers": []}}
    told = json.dumps({"Docker": config} if name == "buildah" else [config])
    put(
        programs,
        name,
        f"case \"$*\" in *--format\\ {{*) echo sha256:0123;; *inspect*) echo '{told}';; pull*) echo 9;; esac",
    )
    made = engine.Engine(name, "").build(Path("F"), Path("context"), "tag", {"A": "b c"}, network=False)
    assert made == "0123"
    (build,) = [call for call in calls(programs) if call.startswith(f"{name} build")]
    assert "--build-arg A=b c" in build
    assert build.endswith(" context")
    assert ("--timestamp" in build) == (name != "docker")
    assert (f"{name} tag 9 tag" in calls(programs)) == (name != "docker")  # with the id of its content
    assert ("--network none" in build) == (name != "buildah")  # its isolation by chroot has the machine's network


def test_the_containerfiles_own_words_are_the_error(programs: Path) -> None:
    put(
        programs,
        "podman",
        "echo 'bascule: the base image has no glibc' >&2; echo 'Error: 1' >&2; exit 1",
    )
    with pytest.raises(ImageError, match=r"^tag: the base image has no glibc$"):
        engine.Engine("podman", "").build(Path("F"), Path("context"), "tag", {}, network=True)


def test_any_other_failure_shows_the_engines_last_words(programs: Path) -> None:
    put(programs, "podman", "echo 'no space left on device' >&2; exit 125")
    with pytest.raises(ImageError, match="podman build failed with status 125:\nno space left on device"):
        engine.Engine("podman", "").build(Path("F"), Path("context"), "tag", {}, network=True)


def test_a_base_image_for_another_processor_is_refused(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    put(programs, "podman", "echo arm64")
    with pytest.raises(ImageError, match=r"BASE_IMAGE debian:12 is for arm64.*amd64"):
        engine.check_architecture(engine.Engine("podman", ""), "debian:12")
    put(programs, "podman", "echo amd64")
    engine.check_architecture(engine.Engine("podman", ""), "debian:12")


def test_an_image_that_is_here_is_not_fetched(programs: Path) -> None:
    put(programs, "podman", "echo sha256:0123")
    engine.Engine("podman", "").pull("debian:12")
    assert not [call for call in calls(programs) if "pull" in call]
    put(programs, "podman", "[ $1 = pull ]")
    engine.Engine("podman", "").pull("debian:12")
    assert calls(programs)[-1] == "podman pull debian:12"
