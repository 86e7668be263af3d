"""A small channel of real packages: this CPython, pip and hatchling in place of conda-forge, bascule-tools of ours."""

from __future__ import annotations

import shutil

import pytest
from small_channel import PLATFORM, ROOT, SHARED, Small

from bundle import base, build, interpreter, stand_in
from bundle.folders import Folders

# A bundle of one metapackage, in place of the real one, which needs all of ours.
META = """\
{% set version = "0.1.0" %}
package:
  name: small-bundle
  version: {{ version }}
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
ENVIRONMENT = "name: small\nchannels: [./out/channel, conda-forge]\ndependencies:\n  - small ==0.1.0\n"


@pytest.fixture(scope="session")
def below() -> base.Base:
    """A channel in place of conda-forge with what needs no framework; a path with a space leads to it."""
    if reason := interpreter.obstacle():
        pytest.skip(reason)
    SHARED.out.mkdir(parents=True, exist_ok=True)
    link = SHARED.out / "with space"
    if not link.is_symlink():
        link.symlink_to(SHARED.out)
    stand_in.make(SHARED, [])
    return base.of_stand_in(link / "stand-in/channel")


@pytest.fixture(scope="session")
def small(below: base.Base, tmp_path_factory: pytest.TempPathFactory) -> Small:
    """The small channel, built and tested against a channel whose path holds a space, as a user's may."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "recipes/bascule-tools", tree / "recipes/bascule-tools")
    (tree / "envs").mkdir()
    (tree / "ci").mkdir()
    for name in ("LICENSE", "conda_build_config.yaml", "ci/constraints.txt", "ci/verify_mirror", "ci/install_env"):
        shutil.copy(ROOT / name, tree / name)
    (tree / "meta.yaml").write_text(META)
    (tree / "envs/small.yaml").write_text(ENVIRONMENT)
    where = Folders(tree, tree / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATTLER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        build.build(where, below, PLATFORM)
    return Small(where, below)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test unpacks into the user's cache, and none finds there what another has damaged."""
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
