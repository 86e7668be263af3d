"""Leftovers of killed runs: the next run removes them, unless a process holds them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddl.launch import guard, leftovers

HOLD = "import sys; from ddl.launch import guard; guard.hold_folder(sys.argv[1]); print(flush=True); sys.stdin.read()"


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(leftovers, "places", lambda: (tmp_path,))
    return tmp_path


@pytest.fixture
def left(where: Path) -> Path:
    """The leftovers of a run that was killed."""
    made = where / f"ddlrun-{os.geteuid()}-0123456789abcdef"
    (made / "ompi.1").mkdir(parents=True)
    (made / "sm_segment.h.0.1.0").write_bytes(b"x" * 100)
    (made / leftovers.MARKER).touch()
    return made


def test_a_run_leaves_nothing(where: Path) -> None:
    with leftovers.folder() as made:
        assert made is not None
        assert made.parent == where
        assert made.stat().st_mode & 0o777 == 0o700
        (made / "sm_segment.h.0.1.0").write_bytes(b"x")
    assert list(where.iterdir()) == []


def test_the_next_run_removes_what_nobody_holds(where: Path, left: Path) -> None:
    with leftovers.folder() as made:
        assert list(where.iterdir()) == [made]


@pytest.fixture
def guarded(left: Path) -> Iterator[Path]:
    """It is held, as by a guard that still ends the job's processes."""
    with subprocess.Popen([sys.executable, "-c", HOLD, left], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield left
        holder.kill()


def test_a_job_that_still_runs_keeps_its_files(where: Path, guarded: Path) -> None:
    leftovers.clear(where)
    assert (guarded / "sm_segment.h.0.1.0").exists()


def test_two_runs_do_not_remove_each_others_files(where: Path) -> None:
    with leftovers.folder() as one, leftovers.folder() as other:
        assert one is not None
        assert other is not None
        assert one.is_dir()
        assert other.is_dir()
    assert list(where.iterdir()) == []


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make another user's files")
def test_another_users_files_are_left_alone(where: Path, left: Path) -> None:
    os.chown(left, 12345, 12345)
    theirs = where / "ddlrun-12345-0123456789abcdef"
    theirs.mkdir()
    (theirs / leftovers.MARKER).touch()
    leftovers.clear(where)
    assert left.exists()
    assert theirs.exists()


def test_a_link_is_not_followed(where: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    precious = tmp_path_factory.mktemp("precious")
    (precious / "file").write_text("x")
    (precious / leftovers.MARKER).touch()
    (where / f"ddlrun-{os.geteuid()}-0123456789abcdef").symlink_to(precious)
    leftovers.clear(where)
    assert (precious / "file").exists()


def test_where_no_folder_can_be_made_the_run_does_without(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "places", lambda: (where / "gone",))
    with leftovers.folder() as made:
        assert made is None
    assert leftovers.variables(None, {}) == {}


def test_the_folder_is_in_memory_if_there_is_room_for_the_files_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, temporary = tmp_path / "memory", tmp_path / "temporary"
    memory.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(leftovers, "places", lambda: (memory, temporary))
    room = {memory: 40 << 20, temporary: 1 << 30}
    monkeypatch.setattr(
        leftovers.os, "statvfs", lambda place: SimpleNamespace(f_bavail=room[place] // 4096, f_frsize=4096)
    )
    assert [leftovers.base(ranks) for ranks in (1, 2, 3)] == [memory, memory, temporary]
    room[temporary] = 0
    assert leftovers.base(3) == temporary


def test_the_next_run_removes_what_killed_runs_left_in_either_place(
    where: Path, left: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path_factory.mktemp("memory")
    monkeypatch.setattr(leftovers, "places", lambda: (memory, where))
    with leftovers.folder():
        assert not left.exists()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a /dev/shm of its own")
def test_a_job_runs_though_dev_shm_is_full() -> None:
    full = 'mount -t tmpfs -o size=64k tmpfs /dev/shm; head -c 64k /dev/zero >/dev/shm/full 2>/dev/null; exec "$@"'
    ddlrun = [Path(sys.executable).with_name("ddlrun"), "-np", "2", "-x", "DDL_TRANSPORT=mpi", sys.executable, "-c"]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", full, "sh", *ddlrun, "import ddl; ddl.init(); print(ddl.size())"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "2\n2\n"), done.stderr


@pytest.mark.parametrize("name", ["precious", "0123456789abcdef"])
def test_a_folder_that_no_run_has_made_is_left_alone(where: Path, name: str) -> None:
    precious = where / f"ddlrun-{os.geteuid()}-{name}"
    precious.mkdir()
    (precious / "file").write_text("x")
    leftovers.clear(where)
    assert (precious / "file").exists()


def test_a_folder_that_cannot_be_locked_does_not_stay(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "held", lambda *_, **__: None)
    with leftovers.folder() as made:
        assert made is None
    assert list(where.iterdir()) == []


@pytest.mark.parametrize("name", ["PRTE_MCA_prte_local_tmpdir_base", "OMPI_MCA_orte_local_tmpdir_base"])
def test_the_folder_that_a_user_has_named_stays(where: Path, name: str) -> None:
    assert leftovers.variables(where, {})[name] == str(where)
    assert name not in leftovers.variables(where, {name: "/theirs"})


def _descendants(root: int) -> set[int]:
    found, new = {root}, {root}
    while new:
        parents = {
            int(one.name): int(fields[1])
            for one in Path("/proc").iterdir()
            if one.name.isdigit() and (fields := guard._fields(int(one.name))) is not None
        }
        new = {pid for pid, parent in parents.items() if parent in found} - found
        found |= new
    return found


@pytest.mark.parametrize("victim", ["ddlrun", "mpirun"])
def test_what_a_killed_job_leaves_is_gone_after_the_next_one(victim: str) -> None:
    program = "import ddl, time; ddl.init(); print('in', flush=True); time.sleep(60)"
    # Over MPI: the files are Open MPI's.
    ddlrun = [Path(sys.executable).with_name("ddlrun"), "-np", "2", "-x", "DDL_TRANSPORT=mpi", sys.executable, "-c"]
    with subprocess.Popen([*ddlrun, program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as job:
        assert job.stdout is not None
        assert [job.stdout.readline(), job.stdout.readline()] == ["in\n", "in\n"]
        pids = _descendants(job.pid)
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
        own = {Path(path) for path in (line.rpartition(" ")[2] for line in maps.splitlines()) if "sm_segment" in path}
        assert len(own) == 2  # one a rank
        names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}
        target = job.pid if victim == "ddlrun" else next(pid for pid in pids if names[pid] in ("prterun", "mpirun"))
        os.kill(target, signal.SIGKILL)
        job.wait(30)
    deadline = time.monotonic() + 10  # the guard ends the ranks
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    subprocess.run([*ddlrun, "pass"], check=True, capture_output=True, timeout=60)
    assert not any(path.exists() for path in own)
    assert not any(path.parent.exists() for path in own)
