"""One run of a sweep: its bound, its process, and what its end means."""

import json
import re
import resource
import sys
from pathlib import Path

import pytest

from lms.errors import UsageError
from lms.sweep.runs import Progress, Row, execute, parse_bounds, with_figures
from lms.tune.metric import Log

MB = 10**6


def test_a_share_is_a_budget_of_the_saved_bytes_and_a_size_a_limit() -> None:
    share, size = parse_bounds("35%, 12GB")
    assert share.words(200 * MB) == ["--budget", str(70 * MB)]
    assert size.words(200 * MB) == ["--limit", str(12 * 10**9)]
    assert [bound.shown(200 * MB) for bound in (share, size)] == ["budget 70 MB", "limit 12 GB"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("101%", "'101%': expected a share of 0% to 100%"),
        ("nan%", "expected a share"),
        ("much", "expected a size"),
        ("50%,,25%", "expected a size"),
        ("50%,50%", "'50%' is given twice"),
    ],
)
def test_what_is_no_limit_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        parse_bounds(text)
    assert f"--limits={text!r}" in str(refused.value)


def ended(tmp_path: Path, source: str) -> Row:
    """The row of a run under a limit that is a process with this source; its argument is where its figures go."""
    stats = tmp_path / "stats.json"
    command = [sys.executable, "-c", source, str(stats)]
    return with_figures(
        Row("LMS 50%", "lms", "budget 5 MB"), *execute(command, tmp_path / "logs" / "log", lambda _: None), stats
    )


def leaving(status: int, **other: object) -> str:
    """The source of a process that leaves figures and ends with `status`."""
    figures = {"steps": 4, "peak": 100, "step_time": 0.5, "swapped_out": 80, "state_out": 20} | other
    return f"import sys; open(sys.argv[1], 'w').write({json.dumps(figures)!r}); sys.exit({status})"


def test_a_run_has_the_figures_that_it_left(tmp_path: Path) -> None:
    assert ended(tmp_path, leaving(0)) == Row("LMS 50%", "lms", "budget 5 MB", 100, 0.5, 4, 25.0)
    assert ended(tmp_path, leaving(6)).note == "memory went over the limit"


@pytest.mark.parametrize(
    ("source", "note"),
    [
        (leaving(1), "exit status 1: it said nothing"),
        ("1 / 0", "exit status 1: ZeroDivisionError: division by zero"),
        (
            "print('lms: error: limit 1 MB is below the floor'); print('later'); exit(3)",
            "limit 1 MB is below the floor",
        ),
        ("print('last'); import os; os.kill(os.getpid(), 9)", "ended by SIGKILL.*memory.*: last"),
        ("", "it left no figures"),
    ],
)
def test_a_run_that_fails_says_why_and_has_no_figures(source: str, note: str, tmp_path: Path) -> None:
    row = ended(tmp_path, source)
    assert (row.peak, row.step) == (None, None)
    assert re.search(note, row.note)


def test_a_run_whose_log_cannot_be_written_says_that(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        row = ended(tmp_path, "print('much'); 1 / 0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert row.note == f"exit status 1: its log '{tmp_path}/logs/log' cannot be written: File too large"


def test_a_run_that_fills_the_disk_says_that_after_its_last_words(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        row = ended(tmp_path, "print('last', flush=True); print('much' * 100, flush=True)")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert re.fullmatch(r"exit status 1: .*; its log '.*/log' cannot be written: File too large", row.note)
    assert (tmp_path / "logs" / "log").read_text() == "last\nmuchm"


def test_a_run_of_one_step_has_a_peak_and_says_that_there_is_no_step_time(tmp_path: Path) -> None:
    row = ended(tmp_path, leaving(0, steps=1, step_time=None))
    assert (row.peak, row.step) == (100, None)
    assert "1 step of PyTorch's optimizers" in row.note


def test_an_interrupt_ends_the_run(tmp_path: Path) -> None:
    log = tmp_path / "log"
    source = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"

    def interrupt(_: float) -> None:
        if Log(log).tail():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute([sys.executable, "-c", source], log, interrupt)
    assert not Path(f"/proc/{int(log.read_text())}").exists()


def test_progress_counts_runs_and_foresees_the_rest_by_those_that_are_over() -> None:
    progress = Progress(4)
    assert progress.text("plain", 3.0) == f"[{'.' * 24}] 1/4 plain: 3 s"
    progress.done += [10.0, 20.0]
    assert progress.text("LMS 50%", 5.0) == f"[{'#' * 14}{'.' * 10}] 3/4 LMS 50%: 5 s, about 25 s left"
