"""A command under a hard cap on its memory."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import cap
import pytest

from lms.errors import LMSError, UsageError

# Touches 300 MB, page by page, and says so.
GREEDY = "held = bytearray(300_000_000)\nfor i in range(0, len(held), 4096): held[i] = 1\nprint('done')"
MODEST = "print('done')"
LIMIT = 150_000_000
MB = 2**20


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


@pytest.fixture
def group() -> cap.Method:
    """The cgroup version that this machine permits."""
    found = cap.method()
    if found == "RLIMIT_DATA":
        pytest.skip("this process may make no memory cgroup (takes root or a delegated one)")
    return found


@pytest.fixture
def swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for a swap file, which will be small."""
    if reason := cap.can_swap():
        pytest.skip(reason)
    monkeypatch.setattr(cap, "_SWAP", 512 * MB)
    return tmp_path


def test_a_command_over_the_limit_fails_and_the_cap_is_named_as_the_cause() -> None:
    result = cap.run(python(GREEDY), limit_bytes=LIMIT)
    assert result.killed
    assert result.returncode != 0
    assert "done" not in result.stdout


def test_a_command_within_the_limit_is_left_alone() -> None:
    result = cap.run(python(MODEST), limit_bytes=LIMIT)
    assert result == cap.CapResult(0, killed=False, stdout="done\n", stderr="", timed_out=False)


def test_a_command_that_fails_by_itself_is_not_called_killed() -> None:
    result = cap.run(python("raise SystemExit(3)"), limit_bytes=LIMIT)
    assert (result.returncode, result.killed) == (3, False)


def test_without_cgroups_the_resource_limit_refuses_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cap, "method", lambda: "RLIMIT_DATA")
    result = cap.run(python(GREEDY), limit_bytes=LIMIT)
    assert result.killed
    assert "MemoryError" in result.stderr
    assert cap.run(python(MODEST), limit_bytes=LIMIT).stdout == "done\n"


def test_the_cgroup_kills_and_reports_a_peak_at_the_limit(group: cap.Method) -> None:
    assert cap.run(python(GREEDY), limit_bytes=LIMIT).returncode == -signal.SIGKILL
    with cap.Cap(LIMIT) as capped:
        assert capped.method == group
        subprocess.run(capped.command(python(GREEDY)), check=False)
        peak = capped.peak()
    assert peak is None or 0.9 * LIMIT < peak <= LIMIT


def test_the_limit_bounds_all_processes_of_a_command_together(group: cap.Method) -> None:
    small = "held = bytearray(100_000_000)\nfor i in range(0, len(held), 4096): held[i] = 1\n"
    parent = small + (
        f"import subprocess, sys\nsys.exit(subprocess.run([sys.executable, '-S', '-c', {small!r}]).returncode)"
    )
    assert cap.run(python(parent), limit_bytes=LIMIT).killed


def test_with_swap_the_command_finishes_and_its_swap_file_is_gone(swap: Path) -> None:
    result = cap.run(python(GREEDY), limit_bytes=LIMIT, swap=swap)
    assert (result.returncode, result.stdout, result.killed) == (0, "done\n", False)
    assert list(swap.iterdir()) == []
    assert str(swap) not in Path("/proc/swaps").read_text()


def test_the_swap_file_is_there_and_on_while_the_cap_is(swap: Path) -> None:
    with cap.Cap(LIMIT, swap=swap):
        (file,) = swap.iterdir()
        assert str(file) in Path("/proc/swaps").read_text()


def test_without_swap_the_cap_kills_even_where_the_machine_swaps(swap: Path) -> None:
    with cap.Cap(LIMIT, swap=swap):
        assert cap.run(python(GREEDY), limit_bytes=LIMIT).killed


def test_a_disk_without_room_for_the_swap_file_is_an_error_that_leaves_nothing(
    swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(LMSError, match="no room"):
        cap.run(python(MODEST), limit_bytes=LIMIT, swap=swap)
    assert list(swap.iterdir()) == []


def test_a_command_that_takes_too_long_is_killed_with_its_children() -> None:
    endless = "import os, signal\nprint(os.getpid(), flush=True)\nchild = os.fork()\nsignal.pause()"
    result = cap.run(python(endless), limit_bytes=LIMIT, timeout=2)
    assert result.timed_out
    assert not result.killed
    assert result.returncode == -signal.SIGKILL


def test_leaving_the_cap_kills_what_still_runs_there_and_removes_the_group(group: cap.Method) -> None:
    with cap.Cap(LIMIT) as capped:
        process = subprocess.Popen(capped.command(python("import signal; signal.pause()")))
        directory = Path(capped.command([])[3]).parent
        assert directory.is_dir()
    assert process.wait(timeout=30) == -signal.SIGKILL
    assert not directory.exists()


def test_the_guard_cleans_up_when_the_process_that_set_the_cap_is_killed(group: cap.Method, swap: Path) -> None:
    code = (
        "import signal\nfrom pathlib import Path\nimport cap\ncap._SWAP = 2**26\n"
        f"with cap.Cap({LIMIT}, swap=Path({str(swap)!r})) as capped:\n"
        "    print(capped.command([])[3], flush=True)\n    print(capped._guard.pid, flush=True)\n    signal.pause()\n"
    )
    folder = Path(cap.__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{folder.parent / 'src'}"}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        directory, guard = Path(process.stdout.readline().strip()).parent, int(process.stdout.readline())
        assert directory.is_dir()
        assert len(list(swap.iterdir())) == 1
        watch = os.pidfd_open(guard)
        process.kill()
    assert select.select([watch], [], [], 30)[0], "the guard did not end"
    os.close(watch)
    assert not directory.exists()
    assert list(swap.iterdir()) == []
    assert str(swap) not in Path("/proc/swaps").read_text()


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_must_be_more_than_zero(limit: int) -> None:
    with pytest.raises(UsageError, match="limit_bytes"):
        cap.run(python(MODEST), limit_bytes=limit)


MOUNTS = """\
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""


def test_the_v1_group_is_found_where_this_process_is() -> None:
    own = "4:memory:/a/b\n0::/c\n"
    assert cap.find_v1(MOUNTS, own) == Path("/sys/fs/cgroup/memory/a/b")
    assert cap.find_v1("", own) is None
    assert cap.find_v1(MOUNTS, "0::/c\n") is None


def test_a_mount_that_shows_a_part_of_the_tree_is_read_relative_to_it() -> None:
    mounts = "35 31 0:32 /docker/x /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    assert cap.find_v1(mounts, "4:memory:/docker/x/y\n") == Path("/sys/fs/cgroup/memory/y")
    assert cap.find_v1(mounts, "4:memory:/elsewhere\n") is None


def test_the_v2_groups_are_listed_nearest_first_up_to_the_mount() -> None:
    top = Path("/sys/fs/cgroup/unified")
    assert cap.find_v2(MOUNTS, "4:memory:/a\n0::/user/session\n") == [top / "user" / "session", top / "user", top]
    assert cap.find_v2(MOUNTS, "4:memory:/a\n") == []


def test_a_cap_can_be_tightened_while_the_command_runs(group: cap.Method) -> None:
    code = "print('ready', flush=True)\ninput()\n" + GREEDY
    with cap.Cap(10 * LIMIT) as capped:
        argv = capped.command(python(code))
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            capped.tighten(LIMIT)
            process.communicate("go\n")
        assert process.returncode == -signal.SIGKILL
        assert capped.kills() == 1
        with pytest.raises(UsageError, match="or less"):
            capped.tighten(2 * LIMIT)
