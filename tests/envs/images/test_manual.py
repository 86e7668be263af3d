"""The sections of docs/images.md that the image `base` is enough for (test_all.py has another)."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import containers
from containers import Built, podman
from manual import blocks, follow

pytestmark = [pytest.mark.root, pytest.mark.timeout(1800)]
TOOLS = containers.ROOT / "out/tools"


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
