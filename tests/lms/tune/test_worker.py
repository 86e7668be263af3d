"""Workers of a search: what they record, and what they leave if they or their trials are killed."""

from __future__ import annotations

import importlib.util
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import optuna
import pytest

PROGRAM = Path(__file__).with_name("worker_program.py")
URL = "sqlite:///search.db"

RIGHT = "import sys; x = float(sys.argv[1]); print(f'step 1: loss={x}'); print(f'step 2: loss={x * x!r}')"


def campaign() -> ModuleType:
    spec = importlib.util.spec_from_file_location("campaign", Path(__file__).with_name("campaign.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def worker(folder: Path, source: str, trials: int = 1, at_once: int = 1, url: str = URL) -> list[str]:
    (folder / "trial.py").write_text(source)
    return [sys.executable, str(PROGRAM), url, str(trials), str(at_once), "trial.py", "threshold:upper=2"]


def searched(folder: Path, source: str, trials: int = 1, at_once: int = 1) -> str:
    """Run a worker to its end; what it said."""
    words = worker(folder, source, trials, at_once)
    done = subprocess.run(words, cwd=folder, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stderr


def study(folder: Path, url: str = URL) -> optuna.Study:
    return optuna.load_study(study_name="search", storage=url.replace("///", f"///{folder}/") if url == URL else url)


def states(folder: Path) -> list[str]:
    return [one.state.name for one in study(folder).trials]


def check_results(trials: list[optuna.trial.FrozenTrial], wanted: int) -> None:
    """Each result is there once, and right; whatever else is there has failed without a value."""
    complete = [one for one in trials if one.state.name == "COMPLETE"]
    assert len(complete) == wanted
    assert len({one.params["x"] for one in complete}) == wanted
    assert all(one.value == one.params["x"] * one.params["x"] for one in complete)
    assert {(one.state.name, one.value) for one in trials if one.state.name != "COMPLETE"} <= {("FAIL", None)}


def test_a_search_records_values_and_steps_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    assert "2 of 2 done" in searched(tmp_path, RIGHT, trials=2)
    searched(tmp_path, RIGHT, trials=3)
    trials = study(tmp_path).trials
    check_results(trials, 3)
    assert trials[0].intermediate_values == {1: trials[0].params["x"], 2: trials[0].value}


KILLS_ITSELF = """
import os, signal, sys
from pathlib import Path
x, died = sys.argv[1], Path("died")
print(f"loss={float(x) * float(x)!r}", flush=True)
if not died.exists():
    died.write_text(x)
    os.kill(os.getpid(), signal.SIGKILL)
assert died.read_text() == x  # the same parameter again
"""


def test_a_trial_that_is_killed_is_done_again_with_its_parameters(tmp_path: Path) -> None:
    assert "ended by SIGKILL; it will be done again" in searched(tmp_path, KILLS_ITSELF)
    check_results(study(tmp_path).trials, 1)


DIES = (
    "import os, sys; print('loss=1', flush=True); os.path.exists('one') and os.kill(os.getpid(), 9); open('one', 'w')"
)


def test_a_trial_that_dies_each_time_has_failed(tmp_path: Path) -> None:
    assert "failed: ended by SIGKILL, 4 times" in searched(tmp_path, DIES, trials=2)
    assert states(tmp_path) == ["COMPLETE", *["FAIL"] * 5]


BELOW = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1]).touch()
while len([name for name in os.listdir() if name.startswith("0.")]) < 2:
    time.sleep(0.01)
print("loss=1")
print("lms: error: the floor is 5 GB. Raise the limit")
print("the job has ended")
sys.exit(3)
"""


def test_what_is_below_the_floor_is_tried_alone_and_then_infeasible(tmp_path: Path) -> None:
    words = worker(tmp_path, BELOW, trials=3, at_once=2)
    done = subprocess.run(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=100)
    assert "it will be tried alone, with all the memory" in done.stderr
    assert "3 trials are below LMS's floor, alone too" in done.stderr
    assert "so the search ends: the floor is 5 GB. Raise the limit. Give more" in done.stderr
    assert "Warning" not in done.stderr  # of steps that a trial says again
    trials = study(tmp_path).trials
    assert [one.state.name for one in trials[:2]] == ["PRUNED", "PRUNED"]
    assert trials[0].user_attrs["lms:outcome"] == "infeasible: the floor is 5 GB"


def test_a_search_of_which_every_trial_is_below_the_floor_names_the_floor(tmp_path: Path) -> None:
    script = "print('lms: rank 1: error: the floor is 5 GB'); raise SystemExit(3)"
    words = worker(tmp_path, script, trials=2)
    done = subprocess.run(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=100)
    assert "LimitError: 2 trials are below LMS's floor, alone too, and no trial has a value" in done.stderr
    assert done.stderr.count("the floor is 5 GB") == 3, "said of each trial, and at the end"


def test_a_first_trial_that_fails_ends_the_search_and_does_not_count(tmp_path: Path) -> None:
    words = worker(tmp_path, "print('this has no number')")
    done = subprocess.run(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 1
    assert "this has no number\n" in done.stderr
    assert "the metric is not in its log" in done.stderr
    searched(tmp_path, RIGHT)
    assert states(tmp_path) == ["FAIL", "COMPLETE"]


def test_a_host_on_which_every_trial_fails_leaves_the_study_to_others(tmp_path: Path) -> None:
    searched(tmp_path, RIGHT)
    words = worker(tmp_path, "raise ImportError('no such package here')", trials=20)
    done = subprocess.run(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 1
    assert "no such package here" in done.stderr
    assert "trials failed 5 times on this host" in done.stderr
    assert states(tmp_path) == ["COMPLETE", *["FAIL"] * 5]


def test_a_trial_whose_log_cannot_be_written_is_left_to_others(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    done = subprocess.run(worker(tmp_path, RIGHT), cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=100)
    assert "NotADirectoryError" in done.stderr or "FileExistsError" in done.stderr
    assert states(tmp_path) == ["FAIL", "WAITING"]


PRUNED = "import sys, time; print('step 7: loss=3', flush=True); time.sleep(600)"


def test_a_trial_that_the_pruner_gives_up_is_ended(tmp_path: Path) -> None:
    assert "pruned at step 7" in searched(tmp_path, PRUNED)
    assert states(tmp_path) == ["PRUNED"]


def test_a_trial_without_a_number_at_its_end_counts_as_failed(tmp_path: Path) -> None:
    assert "not a number at its end" in searched(tmp_path, "print('loss=1'); print('loss=nan')")
    assert states(tmp_path) == ["FAIL"]


WAITS = "import sys, time; x = float(sys.argv[1]); print('up', flush=True); time.sleep({}); print(f'loss={{x * x!r}}')"


def running(folder: Path, words: list[str], trials: int) -> subprocess.Popen[str]:
    """A worker whose trials are under way."""
    one = subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True)
    while sum("up" in log.read_text() for log in folder.glob("logs/*.log")) < trials:
        assert one.poll() is None, one.communicate()
        time.sleep(0.01)
    return one


def test_a_worker_that_is_asked_to_end_gives_its_trials_back(tmp_path: Path) -> None:
    with running(tmp_path, worker(tmp_path, WAITS.format(600), 2, at_once=2), 2) as one:
        one.send_signal(signal.SIGTERM)
        assert one.wait() == 143
    assert states(tmp_path) == ["FAIL", "FAIL", "WAITING", "WAITING"]
    params = [one.params for one in study(tmp_path).trials]
    assert params[:2] == params[2:]
    searched(tmp_path, RIGHT, trials=2)
    check_results(study(tmp_path).trials, 2)


def test_the_trial_of_a_killed_worker_is_done_again_by_another(tmp_path: Path) -> None:
    with running(tmp_path, worker(tmp_path, WAITS.format(600)), 1) as one:
        one.kill()
    assert "nothing was heard of its worker" in searched(tmp_path, RIGHT)
    check_results(study(tmp_path).trials, 1)


@pytest.mark.slow
def test_a_trial_that_never_had_a_heartbeat_is_done_again(tmp_path: Path) -> None:
    searched(tmp_path, RIGHT)
    study(tmp_path).ask({"x": optuna.distributions.FloatDistribution(0, 1)})  # as a worker that was killed then
    searched(tmp_path, RIGHT, trials=2)
    check_results(study(tmp_path).trials, 2)


@pytest.mark.slow
def test_a_worker_waits_for_a_database_that_is_away(tmp_path: Path) -> None:
    with running(tmp_path, worker(tmp_path, WAITS.format(1)), 1) as one:
        with sqlite3.connect(tmp_path / "search.db", isolation_level=None) as away:
            away.execute("BEGIN EXCLUSIVE")
            assert one.stderr is not None
            said = ""
            while "does not answer" not in said:
                said = one.stderr.readline()
            assert "database is locked" in said
            away.execute("COMMIT")
        assert "the database answers again, after" in one.communicate()[1]
        assert one.returncode == 0
    check_results(study(tmp_path).trials, 1)


def test_no_kill_loses_a_result_or_counts_one_twice(tmp_path: Path) -> None:
    words = worker(tmp_path, WAITS.format(0.2), trials=12, at_once=2)
    campaign().run(words, tmp_path, trials=10, kills=3, delay=0.2, seed=int.from_bytes(os.urandom(2)))
    check_results(study(tmp_path).trials, 12)


SCRIPT = """
import sys, time
x = float(sys.argv[1].removeprefix("--x="))
for step in range(4):
    time.sleep(0.5)
    print(f"step {step}: loss={x}")
print(f"loss={x * x!r}")
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_of_100_trials_under_10_kills_there_are_100_results(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    url = os.environ.get("LMS_TUNE_STORAGE", URL)  # an empty database elsewhere
    options = ["--trials", "100", "--at-once", "2", "--heartbeat", "2", "--storage", url, "--study", "search"]
    words = [sys.executable, "-m", "lms", "tune", *options, "--param", "x=uniform:0:1", "--metric", "loss", "train.py"]
    campaign().run(words, tmp_path, trials=100, kills=10, delay=5, seed=int.from_bytes(os.urandom(2)))
    check_results(study(tmp_path, url).trials, 100)
