"""`ci/verify_mirror` on a small mirror that is right, and on damaged ones."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

VERIFY = Path(__file__).parents[2] / "ci/verify_mirror"
PACKAGE = "channel/noarch/thing-1.0-0.conda"


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """A mirror of one package, in a folder with a space in its name; sha256sum makes the sums."""
    folder = tmp_path / "a mirror"
    (folder / PACKAGE).parent.mkdir(parents=True)
    (folder / PACKAGE).write_bytes(b"content" * 1000)
    (folder / "verify_mirror").write_bytes(VERIFY.read_bytes())
    names = [PACKAGE, "verify_mirror"]
    sums = subprocess.run(["sha256sum", *names], cwd=folder, capture_output=True, check=True, timeout=60).stdout
    (folder / "SHA256SUMS").write_bytes(sums)
    (folder / ".lock").touch()  # no file of the mirror
    return folder


def verify(*words: str | Path) -> subprocess.CompletedProcess[str]:
    # Isolated: it must need nothing but Python's own library.
    return subprocess.run([sys.executable, "-I", *words], capture_output=True, text=True, timeout=60, cwd="/")


def test_a_mirror_that_is_right_passes_by_the_copy_that_lies_in_it(mirror: Path) -> None:
    for words in ([VERIFY, mirror], [mirror / "verify_mirror"]):
        done = verify(*words)
        assert (done.returncode, done.stdout) == (0, "verify_mirror: 2 files are as they were made\n"), done.stderr


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: (m / PACKAGE).write_bytes(b"content" * 999), f"{PACKAGE}: has checksum"),
        (lambda m: (m / PACKAGE).write_bytes(b"Content" + b"content" * 999), f"{PACKAGE}: has checksum"),
        (lambda m: (m / PACKAGE).unlink(), f"{PACKAGE}: is missing"),
        (lambda m: (m / "channel/noarch/other-1.0-0.conda").touch(), "other-1.0-0.conda: is not in SHA256SUMS"),
    ],
)
def test_what_is_damaged_is_named_and_the_status_says_so(
    mirror: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(mirror)
    done = verify(VERIFY, mirror)
    assert done.returncode == 1
    assert message in done.stderr
    assert "problems: `make mirror` again" in done.stderr


@pytest.mark.parametrize("sums", [None, "no checksum\n"])
def test_a_folder_that_is_no_mirror_is_a_status_of_its_own(tmp_path: Path, sums: str | None) -> None:
    if sums is not None:
        (tmp_path / "SHA256SUMS").write_text(sums)
    done = verify(VERIFY, tmp_path)
    assert done.returncode == 2
    assert "is no mirror, or its SHA256SUMS is damaged" in done.stderr
