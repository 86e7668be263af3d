"""A small channel of real packages: this CPython, pip and hatchling in place of conda-forge, bascule-tools of ours."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from small_channel import PLATFORM, ROOT, SHARED, STAND_IN, Small

from bundle import base, build, interpreter, stand_in, variants
from bundle.folders import Folders

# A bundle of one metapackage, in place of the real one, which needs all of ours.
META = """\
{% set version = "0.1.0" %}
package:
  name: small-bundle
  version: {{ version }}
build:
  number: 0
outputs:
  - name: small
    build:
      noarch: generic
    requirements:
      run:
        - bascule-tools =={{ version }}
    test:
      commands:
        - bascule info
    about:
      license: Apache-2.0
      license_file: LICENSE
      summary: The metapackage of a test
"""
ENVIRONMENT = (
    "name: small\nchannels:\n  - ./out/channel\n  - conda-forge\n  - nodefaults\ndependencies:\n  - small ==0.1.0\n"
)


@pytest.fixture(scope="session")
def stand_in_channel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A channel in place of conda-forge with what needs no framework, below a folder with a space in its name."""
    if reason := interpreter.obstacle():
        pytest.skip(reason)
    SHARED.stand_in.mkdir(parents=True, exist_ok=True)
    folder = tmp_path_factory.mktemp("shared") / "stand in"
    folder.symlink_to(SHARED.stand_in)
    return stand_in.make(folder, STAND_IN, variants.read(SHARED.variants), ROOT / "ci/constraints.txt")


@pytest.fixture(scope="session")
def small(stand_in_channel: Path, tmp_path_factory: pytest.TempPathFactory) -> Small:
    """The small channel, built and tested against a channel whose path holds a space, as a user's may."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "recipes/bascule-tools", tree / "recipes/bascule-tools")
    shutil.copy(ROOT / "LICENSE", tree / "LICENSE")
    used = variants.read(SHARED.variants)  # those that no recipe here uses would be an error
    for name in ("mpi", "pytorch", "tensorflow"):
        del used[name]
    (tree / "conda_build_config.yaml").write_text(yaml.safe_dump(used, default_flow_style=False))
    (tree / "meta.yaml").write_text(META)
    (tree / "envs").mkdir()
    (tree / "envs/small.yaml").write_text(ENVIRONMENT)
    (tree / "ci").mkdir()
    for name in ("constraints.txt", "verify_mirror", "install_env"):
        shutil.copy(ROOT / "ci" / name, tree / "ci" / name)
    patch = pytest.MonkeyPatch()
    patch.setenv("RATTLER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    where = Folders(tree, tree / "out")
    below = base.of_folder("stand-in", stand_in_channel, PLATFORM, "a test")
    build.build(where, below, PLATFORM)
    patch.undo()
    return Small(where, below)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test unpacks into the user's cache, and none finds there what another has damaged."""
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
