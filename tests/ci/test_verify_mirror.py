"""`ci/verify_mirror` on small mirrors that are right, and on damaged ones."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

VERIFY = Path(__file__).parents[2] / "ci/verify_mirror"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """A mirror of one package, in a folder with a space in its name."""
    folder = tmp_path / "a mirror"
    channel = folder / "channel/noarch"
    channel.mkdir(parents=True)
    package = channel / "thing-1.0-0.conda"
    package.write_bytes(b"content" * 1000)
    index = {"packages": {}, "packages.conda": {package.name: {"sha256": digest(package)}}}
    (channel / "repodata.json").write_text(json.dumps(index))
    (folder / "README.txt").write_text("a page")
    files = [path for path in folder.rglob("*") if path.is_file()]
    (folder / "SHA256SUMS").write_text("".join(f"{digest(path)}  {path.relative_to(folder)}\n" for path in files))
    return folder


def verify(folder: Path) -> subprocess.CompletedProcess[str]:
    # Isolated: it must need nothing but Python's own library.
    return subprocess.run([sys.executable, "-I", VERIFY, folder], capture_output=True, text=True, timeout=60)


def test_a_mirror_that_is_right_passes(mirror: Path) -> None:
    done = verify(mirror)
    assert (done.returncode, done.stdout) == (0, "verify_mirror: 3 files are as they were made\n"), done.stderr


def test_a_lock_or_a_mark_is_no_file_of_the_mirror(mirror: Path) -> None:
    (mirror / ".lock").touch()
    assert verify(mirror).returncode == 0


def test_the_checksums_are_those_of_sha256sum(mirror: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=mirror, check=True, timeout=60)


def test_its_copy_in_a_mirror_checks_that_mirror(mirror: Path) -> None:
    copy = mirror / "verify_mirror"
    copy.write_bytes(VERIFY.read_bytes())
    with (mirror / "SHA256SUMS").open("a") as file:
        file.write(f"{digest(copy)}  {copy.name}\n")
    done = subprocess.run([sys.executable, copy], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


PACKAGE = "channel/noarch/thing-1.0-0.conda"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: (m / PACKAGE).write_bytes(b"content" * 999), f"{PACKAGE}: has checksum"),
        (lambda m: (m / PACKAGE).write_bytes(b"Content" + b"content" * 999), f"{PACKAGE}: has checksum"),
        (lambda m: (m / PACKAGE).unlink(), f"{PACKAGE}: is missing"),
        (lambda m: (m / "channel/noarch/other-1.0-0.conda").touch(), "other-1.0-0.conda: is not in SHA256SUMS"),
        (lambda m: (m / "more.yaml").touch(), "more.yaml: is not in SHA256SUMS"),
        (lambda m: edit(m / "README.txt", "page", "pagé"), "README.txt: has checksum"),
        (lambda m: edit(m / "SHA256SUMS", "  README", "  ../README"), "is no checksum of a file below this folder"),
        (lambda m: edit(m / "SHA256SUMS", "  ", " "), "line 1 is no checksum of a file"),
        (lambda m: edit(m / "channel/noarch/repodata.json", '"sha256"', '"sha257"'), "repodata.json: is no index"),
        (lambda m: (m / "channel/noarch/repodata.json").write_text("{"), "repodata.json: is no index"),
    ],
)
def test_what_is_damaged_is_named_and_the_status_says_so(mirror: Path, damage: object, message: str) -> None:
    assert callable(damage)
    damage(mirror)
    done = verify(mirror)
    assert done.returncode == 1
    assert message in done.stderr
    assert "problems: `make mirror` again" in done.stderr


def test_an_index_that_was_swapped_for_another_with_its_checksum_is_found(mirror: Path) -> None:
    index = mirror / "channel/noarch/repodata.json"
    before = digest(index)
    index.write_text(index.read_text().replace(digest(mirror / PACKAGE), "0" * 64))
    edit(mirror / "SHA256SUMS", before, digest(index))
    done = verify(mirror)
    assert done.returncode == 1
    assert f"{PACKAGE}: SHA256SUMS and the index have different checksums" in done.stderr


def test_a_folder_that_is_no_mirror_is_a_wrong_command_line(tmp_path: Path) -> None:
    done = verify(tmp_path)
    assert done.returncode == 2
    assert "is no mirror: SHA256SUMS cannot be read" in done.stderr
