"""docs/images.md followed: each command of a section as it stands there, in a copy of what a user has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import containers
from containers import Built, podman

pytestmark = [pytest.mark.root, pytest.mark.timeout(1800)]
MANUAL = containers.ROOT / "docs/images.md"
TOOLS = containers.ROOT / "out/tools"


def blocks(section: str) -> list[str]:
    """The blocks of commands below a heading of the manual."""
    (text,) = re.findall(rf"^##+ {re.escape(section)}$(.*?)(?=^##|\Z)", MANUAL.read_text(), re.MULTILINE | re.DOTALL)
    return [
        "".join(line[4:] + "\n" for line in block.splitlines())
        for block in re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    ]


@pytest.fixture
def place(needs_podman: None, tmp_path: Path) -> Iterator[Path]:
    """A folder with the programs and the compose file, all UID 1000's, in which commands are given."""
    folder = tmp_path / "bascule"
    for name in ("examples", "envs/images"):
        shutil.copytree(containers.ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["chown", "-R", "1000:1000", folder], check=True)
    yield folder
    podman("rm", "--force", "--ignore", "--time", "0", "c1", "c2", "host1", "host2")


def follow(commands: str, place: Path, **variables: str) -> containers.Done:
    """Run the commands as a user who stops at the first that fails."""
    if limits := containers.LIMITS():  # a machine whose root may not raise limits says so once, in a file
        file = place.parent / "containers.conf"
        file.write_text(f"[containers]\ndefault_ulimits = {[word for word in limits if '=' in word]}\n")
        variables["CONTAINERS_CONF"] = str(file)
    # What is made by root here is UID 1000's for a user.
    script = f"chown() {{ command chown -R 1000:1000 {place}; }}\ntrap chown DEBUG\n{commands}"
    return subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=place, env=os.environ | variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def test_several_containers_become_hosts_as_the_manual_says(base: Built, place: Path) -> None:
    key, run, *_ = blocks("Several containers as hosts")
    try:
        done = follow(key + run, place, IMAGE=base.reference)
    finally:
        podman("network", "rm", "--force", "job")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^2 ranks on 2 hosts: ", done.stdout, re.MULTILINE), done.stdout


def test_the_compose_file_makes_them_too(base: Built, place: Path) -> None:
    if not (TOOLS / "pins").exists():
        pytest.skip("podman-compose is missing: ci/chart_tools puts it into out/tools")
    key, _, compose = blocks("Several containers as hosts")
    programs = place.parent / "bin"
    programs.mkdir()
    program = programs / "podman-compose"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={TOOLS}/python exec {sys.executable} -m podman_compose "$@"\n')
    program.chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    try:
        done = follow(key + compose, place, IMAGE=base.reference, PATH=path)
    finally:
        podman("rm", "--force", "--ignore", "--time", "0", "bascule_host1_1", "bascule_host2_1")
        podman("pod", "rm", "--force", "--ignore", "pod_bascule")
        podman("network", "rm", "--force", "bascule_default")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^2 ranks on 2 hosts: ", done.stdout, re.MULTILINE), done.stdout
