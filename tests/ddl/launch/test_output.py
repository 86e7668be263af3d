"""Output files: whole or not at all, through links, in place if they are devices or FIFOs."""

import os
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddl import ddlrun
from ddl.launch.output import output_file, write


def test_an_old_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_bytes(b"old and longer")
    with path.open("rb") as reader:
        write(output_file(str(path)), b"new")
        assert reader.read() == b"old and longer"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_is_written_to_and_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    device = tmp_path / "null.svg"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.write_bytes(b"")
    except OSError as error:
        pytest.skip(f"no device can be made here: {error.strerror}")
    write(output_file(str(device)), b"content")
    assert ddlrun.main(["plan", "minsky", "--plot", str(device)]) == 0
    assert stat.S_ISCHR(device.lstat().st_mode)
    assert list(tmp_path.iterdir()) == [device]


def test_a_fifo_is_written_for_its_reader(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    assert output_file(str(fifo)) == fifo  # without a reader, and returns all the same
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(fifo.read_bytes)
        write(fifo, b"content")
        assert read.result(timeout=30) == b"content"
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_links_are_followed_whether_there_is_something_behind_them_or_not(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("old.json", "new.json"):
        link, target = tmp_path / name, tmp_path / "there" / name
        link.symlink_to(target)
        if name == "old.json":
            target.write_bytes(b"old")
        write(output_file(str(link)), b"content")
        assert link.is_symlink()
        assert target.read_bytes() == b"content"


def test_a_file_that_stdout_goes_to_keeps_what_was_printed(tmp_path: Path) -> None:
    program = "from ddl.launch.output import *; print('table', flush=True); write(output_file({!r}), b'figures')"
    for name in ("/dev/stdout", "out"):
        with (tmp_path / "out").open("wb") as out:
            subprocess.run([sys.executable, "-c", program.format(name)], stdout=out, cwd=tmp_path, check=True)
        assert (tmp_path / "out").read_bytes() == b"table\nfigures"
    ours, its = socket.socketpair()
    with ours, its:
        subprocess.run([sys.executable, "-c", program.format("/dev/stdout")], stdout=its, check=True)
        assert ours.recv(100) == b"table\nfigures"


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("link")
    (tmp_path / "to_a_folder").symlink_to(".")
    (tmp_path / "into_nothing").symlink_to("missing/bench.json")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    for name, why in (
        ("link", "[Ss]ymbolic links"),
        ("to_a_folder", "is a folder; expected a file"),
        ("into_nothing", "there is no folder .*missing; make it"),
        ("socket", "is a socket; expected a file"),
        ("a" * 256, "too long"),
    ):
        with pytest.raises(ValueError, match=why):
            output_file(str(tmp_path / name))
