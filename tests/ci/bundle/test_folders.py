import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bundle import folders

ROOT = Path(__file__).parents[3]


def test_no_file_that_git_holds_is_taken_for_debris() -> None:
    """A folder of sources that is named build or dist would be missing in a package, and nobody would be told."""
    if not (ROOT / ".git").exists():  # a copy of the tree, without its history
        pytest.skip("this is a copy of the tree without git's history")
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    held = {name for name in listed.split("\0") if name and os.path.lexists(ROOT / name)}
    assert len(held) > 5
    assert sorted(held - {str(path.relative_to(ROOT)) for path in folders.sources(ROOT)}) == []


@pytest.mark.parametrize("change", ["content", "name", "mode", "debris"])
def test_a_checksum_sees_content_names_and_modes_of_sources(tmp_path: Path, change: str) -> None:
    path = tmp_path / "a.py"
    path.write_text("1")
    before = folders.checksum(tmp_path)
    match change:
        case "content":
            path.write_text("2")
        case "name":
            path.rename(tmp_path / "b.py")
        case "mode":
            path.chmod(0o755)
        case _:
            (tmp_path / "b.so").touch()
    assert (folders.checksum(tmp_path) == before) == (change == "debris")


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    folders.write(path, "old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        folders.write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_worker_ends_when_its_parent_is_killed() -> None:
    program = (
        "import os, time; from bundle import process\n"
        "if __name__ == '__main__':\n"
        "    with process.pool(1) as pool:\n"
        "        print(pool.submit(os.getpid).result(), flush=True)\n"
        "        pool.submit(time.sleep, 600).result()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT / "ci", stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        status = Path(f"/proc/{worker}/stat")
        for _ in range(10_000_000):  # pytest's own limit is the end of it
            if not status.exists() or re.search(r"\) Z ", status.read_text()):
                return
