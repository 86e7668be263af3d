"""The engines' names on PATH are scripts here, which note what they are asked for."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

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


# What is built has the id 9.
IIDFILE = """
last=
for word in "$@"; do
    [ "$last" != --iidfile ] || echo sha256:9 >"$word"
    last=$word
done
"""


def put(folder: Path, name: str, script: str = "") -> None:
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "$0 $*" >>{folder}/log\n{IIDFILE}{script}\n')
    path.chmod(0o755)


def wanted(**more: object) -> engine.Build:
    return engine.Build(**{"containerfile": Path("F"), "context": Path("context"), "name": "tag", "arguments": {},
                           "network": True} | more)  # type: ignore[arg-type] # fmt: skip


def calls(folder: Path) -> list[str]:
    return (folder / "log").read_text().replace(f"{folder}/", "").splitlines()


def test_a_docker_without_its_daemon_gives_way_to_podman_which_is_said(programs: Path) -> None:
    put(programs, "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    put(programs, "podman")
    chosen = engine.choose(None)
    assert chosen.name == "podman"
    assert "Cannot connect to the Docker daemon" in chosen.reason


def test_an_engine_that_does_not_work_gives_way_to_the_next(programs: Path) -> None:
    put(programs, "podman", "echo 'no subuid ranges found' >&2; exit 125")
    put(programs, "buildah")
    chosen = engine.choose(None)
    assert chosen.name == "buildah"
    assert "podman: it does not work here (no subuid ranges found)" in chosen.reason


def test_a_daemon_that_hangs_gives_way_too(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(programs, "docker")
    put(programs, "podman")
    really = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        if command[:2] == ["docker", "version"]:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return really(command, **options)

    monkeypatch.setattr(subprocess, "run", run)
    assert engine.choose(None).reason == "docker: its daemon does not answer (nothing in 20 s); this one works"


def test_podman_under_dockers_name_is_not_taken_for_docker(programs: Path) -> None:
    put(programs, "docker", "echo 'podman version 4.9.4'")
    put(programs, "podman")
    assert engine.choose(None).name == "podman"
    with pytest.raises(ImageError, match="docker: it is podman under docker's name: ENGINE=podman"):
        engine.choose("docker")


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


@pytest.mark.parametrize("name", engine.ENGINES)
def test_a_build_gets_its_arguments_and_no_network_where_it_needs_none(programs: Path, name: str) -> None:
    config: dict[str, object] = dict.fromkeys(("architecture", "os", "created", "Architecture", "Os", "Created"), "x")
    config |= {"config": {}, "Config": {}, "history": [], "History": []}
    config |= {"rootfs": {"diff_ids": []}, "RootFS": {"Layers": []}}
    told = json.dumps({"Docker": config} if name == "buildah" else [config])
    put(
        programs,
        name,
        f"case \"$*\" in *--format\\ {{*) echo sha256:0123;; *inspect*) echo '{told}';; pull*) echo 0123;; esac",
    )
    made = engine.ENGINES[name]("").build(wanted(arguments={"A": "b c"}, network=False))
    assert made == "0123"
    (build,) = [call for call in calls(programs) if call.startswith(f"{name} build")]
    assert "--build-arg A=b c" in build
    assert build.endswith(" context")
    assert ("--timestamp" in build) == (name != "docker")
    if name == "docker":
        assert "--tag tag" in build
    else:  # which has its name when it has the id of its content, and not before
        assert "--tag" not in build
        assert f"{name} tag 0123 tag" in calls(programs)
    assert (f"{name} rmi --no-prune 9" in calls(programs)) == (name == "podman")
    assert ("--network none" in build) == (name != "buildah")  # its isolation by chroot has the machine's network


# What the end of a build that fails looks like: docker's BuildKit puts the step and the seconds before each line, and
# says at the end again what failed, with the part of the Containerfile that it is in.
BUILDKIT = """\
#6 [framework 2/3] RUN set -eu;     found=$(uname -m);     if ...
#6 0.301 bascule: the base image has no glibc
#6 ERROR: process "/bin/sh -c set -eu; ..." did not complete successfully: exit code: 1
------
 > [framework 2/3] RUN set -eu;     found=$(uname -m);     if ...:
0.301 bascule: the base image has no glibc
------
Containerfile:21
--------------------
  20 |     # hadolint ignore=DL3008
""" + "".join(f'  {number} | >>>         echo "bascule: line {number}" >&2; exit 1; \\\n' for number in range(21, 44))
OWN_WORDS = "bascule: the base image has no glibc\n"
FAILURES = [
    ("docker", BUILDKIT + "ERROR: failed to solve: process ... did not complete successfully: exit code: 1\n", 2),
    ("docker", f"Step 5/9 : RUN set -eu;\n\x1b[91m{OWN_WORDS}\x1b[0mThe command returned a non-zero code: 1\n", 1),
    ("podman", f"{OWN_WORDS}Error: building at STEP: exit status 1\n", 2),
    ("buildah", f"{OWN_WORDS}error building at STEP: exit status 1\n", 2),
]


@pytest.mark.parametrize(("name", "said", "stream"), FAILURES, ids=["buildkit", "docker", "podman", "buildah"])
def test_the_containerfiles_own_words_are_the_error(programs: Path, name: str, said: str, stream: int) -> None:
    (programs / "said").write_text(said)
    put(programs, name, f'while read -r line; do echo "$line"; done <{programs}/said >&{stream}; exit 1')
    with pytest.raises(ImageError, match=r"^tag: the base image has no glibc$"):
        engine.ENGINES[name]("").build(wanted())


def test_a_docker_that_keeps_what_it_built_to_itself_is_an_error_that_says_what_to_do(programs: Path) -> None:
    put(programs, "docker", "[ $1 = build ]")
    with pytest.raises(ImageError, match=r"built tag and does not find it.*docker buildx use default"):
        engine.Docker("").build(wanted())


def test_who_sits_at_a_terminal_sees_the_build(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(programs, "docker", "case $1 in build) echo STEP 1; echo fetching >&2;; *) echo sha256:0123;; esac")
    terminal, end = pty.openpty()
    with os.fdopen(terminal, "rb") as seen, os.fdopen(end, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        engine.Docker("").build(wanted())
        stderr.flush()
        assert seen.readline() + seen.readline() == b"STEP 1\r\nfetching\r\n"


def test_an_image_whose_id_cannot_be_made_its_contents_is_named_all_the_same(
    programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(programs, "podman", "case $1 in image) echo 'no such layer' >&2; exit 125;; esac")
    assert engine.Podman("").build(wanted()) == "9"
    assert calls(programs)[-1] == "podman tag 9 tag"
    assert capsys.readouterr().err == "images: tag keeps the id of this one build: no such layer\n"


def test_any_other_failure_shows_the_engines_last_words(programs: Path) -> None:
    put(programs, "podman", "echo 'no space left on device' >&2; exit 125")
    with pytest.raises(ImageError, match="podman build failed with status 125:\nno space left on device"):
        engine.Podman("").build(wanted())


def test_a_base_image_for_another_processor_is_refused(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    put(programs, "podman", "echo arm64")
    with pytest.raises(ImageError, match=r"BASE_IMAGE debian:12 is for arm64.*amd64"):
        engine.check_architecture(engine.Podman(""), "debian:12")
    put(programs, "podman", "echo amd64")
    engine.check_architecture(engine.Podman(""), "debian:12")


def test_an_image_that_is_here_is_not_fetched(programs: Path) -> None:
    put(programs, "podman", "echo sha256:0123")
    engine.Podman("").pull("debian:12")
    assert not [call for call in calls(programs) if "pull" in call]
    put(programs, "podman", "[ $1 = pull ]")
    engine.Podman("").pull("debian:12")
    assert calls(programs)[-1] == "podman pull debian:12"
