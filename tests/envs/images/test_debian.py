"""On a plain Debian, as users take one from a registry: what it lacks is installed when the image is built."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import containers
from containers import ALLREDUCE, Built, podman, run
from images import root

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(1800)]


@pytest.fixture
def debian(needs_podman: None, tmp_path: Path) -> Iterator[str]:
    """An image of Debian's packages of priority required, and apt; its name."""
    archive = tmp_path / "debian.tar"
    settings = [f"--aptopt={setting}" for setting in root.apt_settings()]
    command = ["mmdebstrap", "--quiet", "--variant=apt", *settings, root.SUITE, str(archive), *root.sources()]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True, timeout=600)
    name = f"localhost/bascule-test-debian:{os.getpid()}"
    assert podman("import", archive, name).returncode == 0
    archive.unlink()
    yield name
    podman("rmi", "--force", name)


def test_what_it_lacks_is_installed_and_the_image_is_no_larger_than_it_may_be(
    base: Built, debian: str, tmp_path: Path
) -> None:
    missing = run(debian, "dpkg-query", "--show", "tini", "libsqlite3-0")
    assert "no packages found matching tini" in missing.stderr
    assert "no packages found matching libsqlite3-0" in missing.stderr
    out = containers.another_place(tmp_path)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BUILDAH_ISOLATION", "chroot")  # its steps have the machine's own way to Debian's packages
            done = containers.build("base", out=out, base_image=debian)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        said = run(base.reference, "ddlrun", "-np", "2", "python", "-c", f"import ssl, sqlite3; {ALLREDUCE}")
        shown = run(base.reference, "dpkg-query", "--show", "--showformat", "${Package}\n", *root.HOST, *root.STAND_IN)
        whole, below = (
            json.loads(podman("image", "inspect", one).stdout)[0]["Size"] for one in (base.reference, debian)
        )
    finally:
        podman("tag", base.id, base.reference)  # the other has the same name
    assert said.returncode == 0, said.stderr
    assert shown.stdout.split() == sorted((*root.HOST, *root.STAND_IN))
    assert whole - below < 250e6
