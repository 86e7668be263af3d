"""Files written whole or not at all, and what is no regular file."""

import os
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lms.errors import LMSError, UsageError
from lms.files import aside, check_output, write_aside, write_output


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A device of our own that takes everything, as /dev/null does; skips if the system does not let us make one."""
    path = tmp_path / "null"
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        path.write_bytes(b"")
    except OSError as error:
        pytest.skip(f"no device can be made here: {error.strerror}")
    return path


def test_a_file_is_written_with_the_folders_above_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "trace.json"
    write_aside(path, b"content")
    assert path.read_bytes() == b"content"


def test_an_old_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b"old and longer")
    write_aside(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_of_the_old_file_never_sees_a_part_of_the_new(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        write_aside(path, b"new")
        assert reader.read() == b"old"


def test_a_write_that_fails_leaves_the_target_and_no_part(tmp_path: Path) -> None:
    target = tmp_path / "taken"
    target.mkdir()
    with pytest.raises(OSError, match="taken"):
        write_aside(target, b"content")
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_new_file_has_the_mode_of_the_umask_and_an_old_one_keeps_its_own(tmp_path: Path, umask: int) -> None:
    new, old, plain = (tmp_path / name for name in ("new", "old", "plain"))
    old.touch()
    old.chmod(0o640)
    before = os.umask(umask)
    try:
        plain.touch()
        write_aside(new, b"content")
        write_aside(old, b"content")
    finally:
        os.umask(before)
    assert new.stat().st_mode == plain.stat().st_mode
    assert old.stat().st_mode & 0o777 == 0o640


def test_a_body_that_fails_leaves_the_old_file_and_no_part(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"old")
    with pytest.raises(NotADirectoryError), aside(path) as part:
        (part / "within").touch()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# What is no regular file, and links


def test_a_device_is_written_to_and_not_replaced(device: Path) -> None:
    before = device.stat()
    assert write_output("--json", device, b"{}") == device
    after = device.stat()
    assert (after.st_ino, after.st_rdev, after.st_mode) == (before.st_ino, before.st_rdev, before.st_mode)
    assert list(device.parent.iterdir()) == [device]


def test_every_rank_writes_to_one_device(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_output("--json", device)
    assert write_output("--json", device, b"{}") == device
    assert list(device.parent.iterdir()) == [device]


def test_a_fifo_is_written_for_its_reader(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    check_output("--json", fifo)  # without a reader, and returns all the same
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(fifo.read_bytes)
        write_output("--json", fifo, b"content")
        assert read.result(timeout=30) == b"content"
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_a_links_target_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    target, link = tmp_path / "there" / "step.json", tmp_path / "step.json"
    target.parent.mkdir()
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_output("--trace", link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert list(target.parent.iterdir()) == [target]


def test_a_link_to_nothing_yet_is_followed(tmp_path: Path) -> None:
    link = tmp_path / "step.json"
    link.symlink_to("new/folder/step.json")
    check_output("--trace", link)
    write_output("--trace", link, b"new")
    assert link.is_symlink()
    assert (tmp_path / "new/folder/step.json").read_bytes() == b"new"


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "step.json"
    link.symlink_to(link)
    with pytest.raises(UsageError, match=r"--trace='.*step\.json': .*[Ss]ymbolic links"):
        check_output("--trace", link)
    with pytest.raises(LMSError, match=r"--trace='.*step\.json': not written: .*[Ss]ymbolic links"):
        write_output("--trace", link, b"new")
    assert link.is_symlink()


def test_a_file_that_output_goes_to_already_keeps_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = (
        "from pathlib import Path; from lms.files import write_output\n"
        "print('before'); write_output('--json', Path('/dev/stdout'), b'{}\\n'); print('after')"
    )
    with out.open("wb") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert out.read_text() == "before\n{}\nafter\n"


# What is written is what was checked


def test_each_rank_has_a_file_of_its_own_and_it_is_the_one_that_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    path, taken = tmp_path / "step.json", tmp_path / "taken.json"
    path.mkdir()  # rank 0's trouble
    check_output("--trace", path)
    assert write_output("--trace", path, b"{}") == tmp_path / "step.rank1.json"
    (tmp_path / "taken.rank1.json").mkdir()
    with pytest.raises(UsageError, match=r"--trace='.*taken\.rank1\.json': a folder"):
        check_output("--trace", taken)


def test_a_folder_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    with pytest.raises(UsageError, match=r"--report='.*link': a folder"):
        check_output("--report", tmp_path / "link")


def test_a_socket_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    with pytest.raises(UsageError, match=r"--json='.*socket': a socket; expected"):
        check_output("--json", path)


def test_a_name_that_no_file_system_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--json='.*a{256}': .*too long"):
        check_output("--json", tmp_path / ("a" * 256))


def test_a_link_below_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file/step.json")
    with pytest.raises(UsageError, match=r"--json='.*link': '.*file' cannot be written to"):
        check_output("--json", tmp_path / "link")


def test_a_socket_is_refused_unless_it_is_what_stdout_goes_to() -> None:
    program = """
from pathlib import Path
from lms.files import check_output, write_output
print("table", flush=True)
check_output("--json", Path("/dev/stdout"))
write_output("--json", Path("/dev/stdout"), b"{}")
"""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        subprocess.run([sys.executable, "-c", program], stdout=theirs, check=True)
        theirs.close()
        assert ours.makefile("rb").read() == b"table\n{}"
