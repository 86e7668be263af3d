"""`lms link measure` on this machine, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from lms import cli
from lms.errors import UsageError
from lms.link import measure, nvml
from lms.link.draft import run
from lms.link.file import FileProbe
from lms.link.profile import Absence, MeasuredLink, Profile
from lms.link.sweep import GB, MB, QUICK_SIZES
from lms.memory import file as files
from lms.memory import machine
from lms.memory.disk import Disk


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "QUICK_SECONDS", 0.5)
    monkeypatch.setattr(measure, "QUICK_SIZES", (4096, 65536, MB))
    monkeypatch.setattr(machine, "last_cache", lambda _: 16384)


def test_a_machine_without_a_gpu_measures_what_there_is_and_says_what_is_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "look", lambda: nvml.Seen((), {}, (Absence("GPU", "no NVIDIA driver is installed"),)))
    output = tmp_path / "here.json"
    assert cli.main(["link", "measure", "--quick", "--dir", str(tmp_path), "-o", str(output), "--name", "box"]) == 0
    printed = capsys.readouterr().out
    profile = Profile.from_dict(json.loads(output.read_text()), "x")
    assert (profile.name, profile.origin) == ("box", "measured")
    assert {"memory", "file"} <= {link.kind for link in profile.links}
    assert "not here: GPU: no NVIDIA driver is installed" in printed
    (file,) = profile.of("file")
    assert [series.direction for series in file.series] == ["out", "back", "both"]
    assert all(series.rate > 0 and series.points for series in file.series)
    assert profile.capacity["host"] > 0
    assert file.name in printed


def test_one_kind_alone(tmp_path: Path) -> None:
    profile = measure.measure(tmp_path, quick=True, kinds=("file",))
    assert {link.kind for link in profile.links} == {"file"}
    assert profile.absent == ()


def test_what_it_takes_to_find_the_links_is_a_part_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch and the GPUs' contexts take seconds to load, before anything is copied."""
    given: list[float] = []
    now = [0.0]

    def find(took: float) -> object:
        now[0] += took
        return nvml.Seen((), {}, ())

    def run(drafts: object, seconds: float, *_: object) -> list[MeasuredLink]:
        given.append(seconds)
        return [MeasuredLink("x", "memory", "")]

    monkeypatch.setattr(measure, "QUICK_SECONDS", 6.0)
    monkeypatch.setattr(measure, "run", run)
    monkeypatch.setattr(measure.time, "monotonic", lambda: now[0])
    for took in (0.0, 2.0, 5.0):
        monkeypatch.setattr(nvml, "look", lambda took=took: find(took))
        measure.measure(tmp_path, quick=True, kinds=("memory",))
    assert given == [6.0, 4.0, 3.0]  # half of it at least


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--dir=.*no such folder; expected a folder"):
        measure.measure(tmp_path / "none", quick=True)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--dir=.*a file; expected"):
        measure.measure(tmp_path / "file", quick=True)


def test_a_folder_that_may_not_be_looked_into_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed, real = tmp_path / "closed", os.stat

    def stat(path: object, **keywords: object) -> os.stat_result:
        if str(path) == str(closed):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", stat)
    for command in ("measure", "show"):
        assert cli.main(["link", command, "--dir", str(closed)]) == 2
        assert f"--dir={str(closed)!r}: Permission denied; expected a folder" in capsys.readouterr().err


def test_a_folder_that_takes_no_file_and_a_disk_that_is_full_are_named_by_the_option_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_open_unlinked", lambda _: os.open(tmp_path / "none" / "x", os.O_RDWR))
    absent: list[Absence] = []
    assert measure.file_drafts(tmp_path, (4096, MB), absent) == []
    assert absent[0].why.startswith(f"--dir={str(tmp_path)!r}: no file can be made there (No such file or directory);")
    monkeypatch.undo()

    def refuse(self: files.FileSlab, place: files.Place, address: int) -> None:
        raise self._refused(place, errno.ENOSPC)

    monkeypatch.setattr(files.FileSlab, "write", refuse)
    with pytest.raises(UsageError, match="nothing could be measured") as found:
        measure.measure(tmp_path, quick=True, kinds=("file",))
    assert f"--dir={str(tmp_path)!r}: writing" in str(found.value)
    assert "No space left on device" in str(found.value)
    assert "spill_dir" not in str(found.value)
    assert "raise the limit" not in str(found.value)


def test_the_memory_of_the_file_is_let_go_with_the_file(tmp_path: Path) -> None:
    probe = FileProbe(tmp_path, MB)
    with probe.copies("out") as copy:
        copy(MB)
    probe.close()
    assert probe._memory is None


def test_pairs_of_nodes_are_links_of_a_kind_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(machine, "nodes", lambda: (machine.Node(0, (0,), 1, ()), machine.Node(1, (1,), 1, ())))
    found = [(draft.link.name, draft.link.kind) for draft in measure.memory_drafts((65536,), [])]
    assert found == [("node0", "memory"), ("node1-node0", "numa"), ("node1", "memory"), ("node0-node1", "numa")]


def test_memory_is_shared_and_a_smaller_sweep_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda *_: MB)
    absent: list[Absence] = []
    (draft, *_) = measure.memory_drafts((4096, 65536, MB), absent)
    assert draft.tasks[0].sizes == (4096, 65536)
    assert "smaller sweep, up to 65.5 KB" in draft.link.notes[0]


def test_sizes_go_well_past_the_last_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "last_cache", lambda _: 3 * MB)
    (draft, *_) = measure.memory_drafts((4096, 65536, MB), [])
    assert {(task.sizes, task.least) for task in draft.tasks} == {((4096, 65536, MB, 6 * MB), 6 * MB)}
    assert draft.link.notes == ()


def test_without_room_past_the_last_cache_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_room", lambda _: 8 * MB)
    monkeypatch.setattr(machine, "last_cache", lambda _: 3 * MB)
    absent: list[Absence] = []
    assert measure.memory_drafts((4096, 65536, MB, 4 * MB), absent) == []
    assert absent[0].why.startswith("copies must be of 6.29 MB or more, well past the caches")


def test_a_machine_that_does_not_tell_its_caches_is_taken_to_have_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_room", lambda _: 1024 * MB)
    monkeypatch.setattr(machine, "last_cache", lambda _: 0)
    (draft, *_) = measure.memory_drafts((4096, 65536, MB), [])
    assert draft.tasks[0].least == 256 * MB


def test_a_disk_too_small_for_the_sweep_gets_a_smaller_one_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = os.statvfs(tmp_path)
    fields = list(state)

    def small(blocks: int) -> object:
        fields[1], fields[4] = 4096, blocks  # f_frsize, f_bavail
        return os.statvfs_result(fields)

    monkeypatch.setattr(measure.os, "statvfs", lambda _: small(5000))  # 20 MB: a tenth holds a MB
    absent: list[Absence] = []
    (draft,) = measure.file_drafts(tmp_path, (4096, MB, 16 * MB), absent)
    assert draft.tasks[0].sizes == (4096, MB)
    assert any("smaller sweep, up to 1.05 MB" in note for note in draft.link.notes)
    draft.close()
    monkeypatch.setattr(measure.os, "statvfs", lambda _: small(500))
    assert measure.file_drafts(tmp_path, (4096, MB, 16 * MB), absent) == []
    assert "free some, or name another folder with --dir" in absent[-1].why


def test_a_slow_disk_has_a_line_for_each_direction_that_was_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def copy(nbytes: int) -> float:
        nonlocal now
        now += nbytes / 0.1e9
        return nbytes / 0.1e9

    monkeypatch.setattr(FileProbe, "copies", lambda *_: nullcontext(copy))
    monkeypatch.setattr(machine, "memory_room", lambda _: GB)
    (link,) = run(measure.file_drafts(tmp_path, QUICK_SIZES, []), 7.0, [], lambda: now)
    said = [note for note in link.notes if "there was no time" in note]
    assert [note.split(",")[0] for note in said] == ["out", "back", "both"]
    assert now < 8


def test_a_folder_in_memory_is_measured_and_called_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmpfs = Disk(str(tmp_path), "tmpfs", "", "", "", memory=True, remote=False, virtual=False, layered=False)
    monkeypatch.setattr(measure, "disk_at", lambda _: tmpfs)
    (link,) = measure.measure(tmp_path, quick=True, kinds=("file",)).links
    assert "which is memory" in link.what
    assert any("that is memory" in note for note in link.notes)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--only", "network"], "expected some of memory, file, gpu, peer"),
        (["--only", ""], "expected some of memory"),
        (["-o", "/"], "a folder; expected the path of a file"),
    ],
)
def test_wrong_usage_is_named(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        raise SystemExit(cli.main(["link", "measure", *argv]))
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


def test_figures_are_printed_though_their_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["link", "measure", "--quick", "--only", "file", "--dir", str(tmp_path), "-o", "/dev/full"]
    assert cli.main(argv) == 1
    out, err = capsys.readouterr()
    assert f"file {tmp_path}" in out
    assert "--output='/dev/full': not written: No space left on device" in err


def test_figures_are_written_though_they_cannot_be_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "here.json"
    with monkeypatch.context() as patch, suppress(OSError), open("/dev/full", "w") as full:
        patch.setattr("sys.stdout", full)
        assert (
            cli.main(["link", "measure", "--quick", "--only", "file", "--dir", str(tmp_path), "-o", str(output)]) == 1
        )
    assert Profile.from_dict(json.loads(output.read_text()), "x").of("file")


def test_names_that_cannot_be_printed_can_be_measured_and_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = tmp_path / "odd\udcff\x1b[31m", tmp_path / "here.json"
    folder.mkdir()
    argv = ["link", "measure", "--quick", "--only", "file", "--dir", str(folder), "-o", str(output), "--name", "\x07"]
    assert cli.main(argv) == 0
    assert f"file {tmp_path}/odd??[31m" in capsys.readouterr().out
    assert cli.main(["link", "show", "--dir", str(folder), "--measured", str(output)]) == 0
    out = capsys.readouterr().out
    assert out.count("O_DIRECT") + out.count("page cache  ") >= 3
    assert "\x1b" not in out
    assert cli.main(["link", "show", str(output)]) == 0
    assert capsys.readouterr().out.startswith("?: measured")


def test_what_was_not_asked_for_is_no_reason_that_nothing_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "look", lambda: nvml.Seen((), {}, (Absence("GPU", "no driver"),)))
    monkeypatch.setattr(machine, "memory_room", lambda _: 0)
    with pytest.raises(UsageError, match="nothing could be measured") as found:
        measure.measure(tmp_path, quick=True, kinds=("memory",))
    assert "GPU" not in str(found.value)


def test_nothing_to_measure_is_an_error_that_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "look", lambda: nvml.Seen((), {}, (Absence("GPU", "no driver"),)))
    with pytest.raises(UsageError, match="nothing could be measured: GPU: no driver"):
        measure.measure(tmp_path, quick=True, kinds=("gpu",))
