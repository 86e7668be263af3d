"""The image `base`, built once as `make image ENV=base` builds it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import containers
from containers import Built, new_key, podman


@pytest.fixture(scope="session")
def needs_podman() -> None:
    """Skips where no container can be run; the skip says why."""
    if why := containers.obstacle():
        pytest.skip(why)


@pytest.fixture(scope="session")
def base(needs_podman: None) -> Built:
    """The image of envs/base.yaml, on a Debian that is made here."""
    containers.channel(out=containers.OUT)
    done = containers.build("base", out=containers.OUT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    ((reference, short, bill),) = containers.made(done)
    return Built(reference, short, bill)


# What the manual's commands, and compose in the folder `place`, make; the tests remove it by these names.
MANUALS = ("c1", "c2", "job", "bascule_host1_1", "bascule_host2_1", "pod_bascule", "bascule_default")


@pytest.fixture
def place(needs_podman: None, tmp_path: Path) -> Iterator[Path]:
    """A folder with the programs and the compose file, all UID 1000's, in which commands are given."""
    if theirs := containers.present(*MANUALS):
        pytest.fail(f"podman has {', '.join(theirs)} already, and this test would remove it: do so, or try again later")
    folder = tmp_path / "bascule"
    for name in ("examples", "envs/images"):
        shutil.copytree(containers.ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["chown", "-R", "1000:1000", folder], check=True)
    yield folder
    podman("rm", "--force", "--ignore", "--time", "0", "c1", "c2")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with a new key, as a user would mount it."""
    return new_key(tmp_path / "keys")


@pytest.fixture
def two_hosts(base: Built, keys: Path) -> Iterator[tuple[str, str]]:
    """Containers c1 and c2 of the image, which have the same key, on a network of their own."""
    mounted = ("--volume", f"{keys}:/etc/bascule/ssh:ro")
    with (
        containers.network() as net,
        containers.container(base.reference, "--network", net, "--name", "c1", "--hostname", "c1", *mounted) as one,
        containers.container(base.reference, "--network", net, "--name", "c2", "--hostname", "c2", *mounted) as two,
    ):
        yield one, two
