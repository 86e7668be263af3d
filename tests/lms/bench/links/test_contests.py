"""The parts of the benchmark of links."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from links import fio, throttle
from links.contests import by_turns, sampling

BENCH = Path(__file__).parents[4] / "lms/bench/links"
MB = 1 << 20


def test_contestants_take_turns_in_an_order_that_rotates() -> None:
    called: list[str] = []

    def entry(name: str):
        return lambda: called.append(name) or float(len(called))

    found = by_turns("x", {name: entry(name) for name in "abc"}, 3, lambda text: None)
    assert "".join(called) == "abcbcacababc"
    # The first round warms up and does not count.
    assert {name: len(values) for name, values in found.items()} == {"a": 3, "b": 3, "c": 3}
    assert min(value for values in found.values() for value in values) == 4.0


def test_sampling_is_cheap_by_the_processes_own_time(tmp_path: Path) -> None:
    result = sampling(tmp_path, 1.0, lambda text: None)
    (verdict,) = result.verdicts
    assert 0 < verdict.value < 0.05
    assert result.measured["readings"] >= 2


@pytest.mark.slow  # `make test-all` installs fio
def test_fio_that_fails_is_an_error_with_its_words(tmp_path: Path) -> None:
    fio.version()
    with pytest.raises(fio.FioError, match=r"fio ended with"):
        fio.rate(tmp_path / "none", MB, 4096, "read")


@pytest.mark.slow
def test_fio_reads_a_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(4 * MB))
    try:
        assert fio.rate(tmp_path / "a", 4 * MB, MB, "read") > 1e6
    except fio.FioError as error:
        if "Invalid argument" not in str(error):  # no O_DIRECT on this file system
            raise


@pytest.mark.slow
def test_fio_and_we_have_the_same_memory(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\7" * 4 * MB)
    with fio.SharedMemory(4 * MB) as shared:
        memory = shared.part(4 * MB)
        try:
            fio.rate(tmp_path / "a", 4 * MB, MB, "read", shared.paths[0])
        except fio.FioError as error:
            if "Invalid argument" not in str(error):  # no O_DIRECT on this file system
                raise
        else:
            assert memory[:MB] == b"\7" * MB


@pytest.mark.root
@pytest.mark.slow
def test_a_throttled_disk_is_as_slow_as_the_kernel_was_told(tmp_path: Path) -> None:
    if why := throttle.refused():
        pytest.skip(why)
    program = (
        "import sys, time; from pathlib import Path; from lms.link.file import FileProbe\n"
        "probe = FileProbe(Path(sys.argv[1]), 64 << 20)\n"
        "with probe.copies('back') as copy: print(sum(copy(16 << 20) for _ in range(8)))\n"
    )
    with throttle.disk(256 * MB) as (folder, number), throttle.throttled(number, 200e6) as prefix:
        command = throttle.wrapped(prefix, [sys.executable, "-c", program, str(folder)])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 128 * MB / float(done.stdout) == pytest.approx(200e6, rel=0.15)
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_run_writes_its_figures_and_a_page(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH), "--quick", "--only", "memory,sampling", "-o", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "links.json").read_text())
    assert document["failed"] == []
    assert set(document["measured"]) == {"memory", "sampling"}
    assert len(document["verdicts"]) == 2
    assert "| figure | value |" in (tmp_path / "links.md").read_text()


@pytest.mark.parametrize(
    ("argument", "words"),
    [("--only=disk", "expected some of file, memory, step, sampling"), ("--rounds=0", "1 or more")],
)
def test_a_wrong_argument_is_named(argument: str, words: str) -> None:
    done = subprocess.run([sys.executable, str(BENCH), argument], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert words in done.stderr
