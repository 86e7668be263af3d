"""The slab file: bytes come back as they went out, or an error says what happened."""

import errno
import fcntl
import mmap
import os
import signal
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lms.errors import CorruptionError, SpillError
from lms.memory.file import FileSlab, Place, address_of, page_memory
from lms.memory.slab import ALIGNMENT

NOISE = os.urandom(5 * ALIGNMENT)


class Bytes:
    """Memory with known bytes that begin `skew` into a page, and known others all around."""

    def __init__(self, content: bytes, skew: int) -> None:
        self.nbytes, self.skew = len(content), skew
        self.memory = page_memory(skew + len(content) + 2 * ALIGNMENT)
        self.memory[:] = b"\xaa" * len(self.memory)
        self.memory[skew : skew + len(content)] = content
        self.address = address_of(self.memory) + skew


def put(slab: FileSlab, content: bytes, skew: int = 0) -> Place:
    source = Bytes(content, skew)
    place = slab.allocate(source.nbytes, skew)
    slab.write(place, source.address)
    return place


def get(slab: FileSlab, place: Place) -> bytes:
    memory = page_memory(place.span)
    slab.read(place, address_of(memory))
    return memory[place.skew : place.skew + place.nbytes]


def raw(slab: FileSlab) -> Path:
    """The file by a name of this process alone: opened through it, single bytes can be changed."""
    return Path(f"/proc/self/fd/{slab.fileno()}")


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[FileSlab]:
    slab = FileSlab(tmp_path)
    yield slab
    slab.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(nbytes=st.integers(0, 3 * ALIGNMENT + 5), skew=st.integers(0, ALIGNMENT - 1))
def test_bytes_come_back_whatever_their_number_and_address(slab: FileSlab, nbytes: int, skew: int) -> None:
    content = NOISE[:nbytes]
    place = put(slab, content, skew)
    assert get(slab, place) == content
    slab.free(place)


@pytest.mark.parametrize("skew", [0, 64, 4032])
@pytest.mark.parametrize("nbytes", [1, 100, ALIGNMENT - 64, ALIGNMENT, ALIGNMENT + 64, 3 * ALIGNMENT - 64])
def test_the_bytes_around_the_tensor_stay_out_of_the_file(slab: FileSlab, nbytes: int, skew: int) -> None:
    place = put(slab, NOISE[:nbytes], skew)
    assert raw(slab).read_bytes()[place.offset : place.offset + place.span] == (
        bytes(skew) + NOISE[:nbytes] + bytes(place.span - skew - nbytes)
    )


def test_places_do_not_overlap(slab: FileSlab) -> None:
    contents = [NOISE[i : i + 3000 + i] for i in range(0, 2000, 100)]
    places = [put(slab, content, skew=64) for content in contents]
    assert [get(slab, place) for place in places] == contents


def test_a_write_or_read_that_the_kernel_cuts_short_goes_on(slab: FileSlab, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, preadv, calls = os.pwritev, os.preadv, []

    def block_by_block(fd: int, parts: list[memoryview], offset: int) -> int:
        calls.append("write")
        return pwritev(fd, [parts[0][:ALIGNMENT]], offset)

    def two_blocks(fd: int, parts: list[memoryview], offset: int) -> int:
        calls.append("read")
        return preadv(fd, [parts[0][: 2 * ALIGNMENT]], offset)

    monkeypatch.setattr(os, "pwritev", block_by_block)
    monkeypatch.setattr(os, "preadv", two_blocks)
    content = NOISE[: 4 * ALIGNMENT]
    assert get(slab, put(slab, content, skew=64)) == content
    assert (calls.count("write"), calls.count("read")) == (5, 3)


# The file itself


def test_the_file_has_no_name_and_is_its_owners_alone(slab: FileSlab, tmp_path: Path) -> None:
    put(slab, NOISE)
    assert list(tmp_path.iterdir()) == []
    state = os.fstat(slab.fileno())
    assert state.st_nlink == 0
    assert stat.S_IMODE(state.st_mode) == 0o600


def test_a_file_system_without_nameless_files_gets_one_that_is_unlinked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: os.PathLike[str] | str, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    slab = FileSlab(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(slab.fileno()).st_nlink == 0
    assert stat.S_IMODE(os.fstat(slab.fileno()).st_mode) == 0o600
    assert get(slab, put(slab, NOISE, 64)) == NOISE
    slab.close()


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from lms.memory.file import FileSlab, page_memory, address_of\n"
        "slab = FileSlab(Path(sys.argv[1])); memory = page_memory(1 << 20)\n"
        "slab.write(slab.allocate(1 << 20, 0), address_of(memory)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_closing_twice_is_fine_and_a_closed_file_takes_nothing(tmp_path: Path) -> None:
    slab = FileSlab(tmp_path)
    place = put(slab, NOISE)
    slab.close()
    slab.close()
    with pytest.raises(ValueError, match="closed"):
        get(slab, place)


def test_the_page_cache_is_passed_by_where_the_file_system_allows_it(slab: FileSlab, tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
        allowed = True
    except OSError:
        allowed = False
    assert slab.direct is allowed
    assert bool(fcntl.fcntl(slab.fileno(), fcntl.F_GETFL) & os.O_DIRECT) is allowed


def test_a_file_system_that_refuses_the_flag_is_used_through_the_cache_and_said_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "invalid argument")
        return real(fd, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.warns(RuntimeWarning, match=r"spill_dir=.*refuses O_DIRECT") as said:
        slab = FileSlab(tmp_path)
    assert len(said) == 1
    assert slab.direct is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get(slab, put(slab, NOISE, 64)) == NOISE
    slab.close()


def test_a_file_system_that_takes_the_flag_but_no_write_is_used_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev

    def refuse(fd: int, parts: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, parts, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.warns(RuntimeWarning, match="refuses O_DIRECT"):
        slab = FileSlab(tmp_path)
    assert get(slab, put(slab, NOISE, 64)) == NOISE
    slab.close()


# What can go wrong


def test_a_full_disk_is_named_with_what_was_asked_what_is_free_and_what_to_do(slab: FileSlab) -> None:
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, slab.fileno())
    os.close(full)
    with pytest.raises(SpillError) as caught:
        put(slab, NOISE)
    message = str(caught.value)
    assert f"spill_dir={str(slab.directory)!r}" in message
    assert "20.5 kB".replace("k", "K") in message
    assert "No space left" in message
    assert "are free there" in message
    assert "larger disk" in message


def test_a_file_size_limit_is_a_full_disk_too(tmp_path: Path) -> None:
    script = (
        "import resource, sys\nfrom pathlib import Path\n"
        "from lms.memory.file import FileSlab, page_memory, address_of\n"
        "from lms.errors import SpillError\n"
        "slab = FileSlab(Path(sys.argv[1])); memory = page_memory(1 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))\n"
        "try: slab.write(slab.allocate(1 << 20, 0), address_of(memory))\n"
        "except SpillError as error: print(error)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=environment, timeout=60, capture_output=True, text=True
    )
    assert "spill_dir=" in done.stdout, done.stderr
    assert "are free there" in done.stdout


def test_a_disk_that_fails_is_named(slab: FileSlab, monkeypatch: pytest.MonkeyPatch) -> None:
    place = put(slab, NOISE)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", fail)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(SpillError, match=r"spill_dir=.*writing .* failed: Input/output error; check the disk"):
        put(slab, NOISE)
    with pytest.raises(SpillError, match=r"spill_dir=.*back failed: Input/output error"):
        get(slab, place)


@pytest.mark.parametrize("length", [0, ALIGNMENT, 2 * ALIGNMENT + 700])
def test_a_file_that_was_cut_is_found_out(slab: FileSlab, length: int) -> None:
    place = put(slab, NOISE, skew=64)
    os.truncate(raw(slab), place.offset + length)
    with pytest.raises(CorruptionError, match="short read"):
        get(slab, place)


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, 12345, len(NOISE) - 1])
def test_a_flipped_byte_is_found_out_when_asked_to_verify(tmp_path: Path, at: int) -> None:
    slab = FileSlab(tmp_path, verify=True)
    place = put(slab, NOISE, skew=64)
    assert get(slab, place) == NOISE
    with open(raw(slab), "r+b") as file:
        file.seek(place.offset + place.skew + at)
        file.write(bytes([NOISE[at] ^ 1]))
    with pytest.raises(CorruptionError, match="other than they were written"):
        get(slab, place)
    slab.close()


def test_a_byte_beside_the_tensor_is_no_corruption(tmp_path: Path) -> None:
    slab = FileSlab(tmp_path, verify=True)
    place = put(slab, NOISE[:5000], skew=64)
    with open(raw(slab), "r+b") as file:
        file.seek(place.offset + 10)
        file.write(b"x")
    assert get(slab, place) == NOISE[:5000]
    slab.close()


def test_what_changes_while_it_is_written_is_no_corruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slab = FileSlab(tmp_path, verify=True)
    memory = page_memory(4 * ALIGNMENT)
    write = os.pwritev

    def write_later(fd: int, parts: list[memoryview], offset: int) -> int:
        memory[:] = bytes(byte ^ 1 for byte in memory[:])
        return write(fd, parts, offset)

    monkeypatch.setattr(os, "pwritev", write_later)
    place = slab.allocate(3 * ALIGNMENT, 64)
    slab.write(place, address_of(memory) + 64)
    assert get(slab, place)
    slab.close()


@pytest.mark.parametrize("kind", ["missing", "a file"])
def test_a_folder_that_is_none_is_named(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "there"
    if kind == "a file":
        folder.write_text("")
    with pytest.raises(SpillError, match=r"spill_dir='.*there'.*local disk"):
        FileSlab(folder)


# Memory to read into


@pytest.mark.parametrize("nbytes", [ALIGNMENT, 4 << 20, (4 << 20) + ALIGNMENT, 64 << 20])
def test_page_memory_is_fresh_page_aligned_and_private(nbytes: int) -> None:
    memory = page_memory(nbytes)
    assert isinstance(memory, mmap.mmap)
    assert len(memory) == nbytes
    assert address_of(memory) % ALIGNMENT == 0
    assert memory[:16] == bytes(16)
    assert memory[-16:] == bytes(16)
