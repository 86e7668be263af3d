import sqlite3
import sys
from pathlib import Path

import optuna
import pytest
import sqlalchemy
from optuna.trial import TrialState
from sqlalchemy.exc import InternalError, OperationalError

from lms.errors import LMSError, UsageError
from lms.tune import storage, study
from lms.tune.storage import _passes
from lms.tune.study import Study, chosen, counted


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("journal.log", "^--storage='journal.log': .* no heartbeats"),
        ("journal+file:///a", "no heartbeats"),
        ("redis://host", "no heartbeats"),
        ("search.db", "expected a database, such as sqlite:///search.db"),
        ("sqlite:///:memory:", "would end with this process"),
    ],
)
def test_what_cannot_hold_a_search_is_refused_with_the_reason(url: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Study(url, "search", 30, "tpe", "nop")


def test_samplers_and_pruners_are_found_by_name_with_their_arguments() -> None:
    assert isinstance(chosen(optuna.samplers, "Sampler", "tpe"), optuna.samplers.TPESampler)
    assert isinstance(chosen(optuna.samplers, "Sampler", "RandomSampler:seed=1"), optuna.samplers.RandomSampler)
    pruner = chosen(optuna.pruners, "Pruner", "threshold:upper=2.5,n_warmup_steps=3")
    assert isinstance(pruner, optuna.pruners.ThresholdPruner)
    assert (pruner._upper, pruner._n_warmup_steps) == (2.5, 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("best", "unknown; Optuna has cmaes"),
        ("grid", "unknown"),
        ("random:speed=1", "speed"),
        ("random:seed=", "invalid syntax"),
        ("random:seed=open('x')", "malformed"),
    ],
)
def test_a_sampler_that_cannot_be_made_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        chosen(optuna.samplers, "Sampler", text)


def test_a_database_that_cannot_be_opened_is_an_error_without_its_password(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr(storage, "_PAUSE", 0)
    with pytest.raises(LMSError, match="cannot be opened") as refused:
        study.Study(f"sqlite:///{tmp_path}/no/folder/a.db", "a", 30, sampler="tpe", pruner="nop")
    assert "unable to open database file" in str(refused.value)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(UsageError, match=r"driver cannot be loaded \(.*psycopg.*pip install 'psycopg\[binary\]'"):
        study.Study("postgresql+psycopg://me@host/base", "a", 30, sampler="tpe", pruner="nop")
    with pytest.raises(UsageError, match=r"'nosuch://me:\*\*\*@host/base'"):
        study.Study("nosuch://me:secret@host/base", "a", 30, sampler="tpe", pruner="nop")


@pytest.fixture
def shared(tmp_path: Path) -> Study:
    """A study in a database of its own."""
    found = Study(f"sqlite:///{tmp_path}/search.db", "search", 30, sampler="random", pruner="nop")
    found.create("minimize", {})
    return found


X = {"x": optuna.distributions.FloatDistribution(0, 1)}


def test_a_trial_that_dies_with_its_worker_each_time_has_failed(shared: Study) -> None:
    for _ in range(4):
        trial = shared.ask(1, X)
        assert trial is not None
        shared.tell(trial, TrialState.FAIL)
        shared.again(trial, "nothing was heard of its worker")
    shared.again(trial, "nothing was heard of its worker")  # as if the database's answer had been lost
    assert len(counted(shared.trials())) == 1
    assert shared.ask(1, X) is None
    last = shared.trials()[-1]
    assert (last.params, last.state) == (shared.trials()[0].params, TrialState.FAIL)
    assert last.user_attrs["lms:outcome"] == "failed: nothing was heard of its worker, 4 times"


def test_two_that_find_a_trial_dead_have_it_done_again_once(shared: Study) -> None:
    trial = shared.ask(2, X)
    assert trial is not None
    shared.tell(trial, TrialState.FAIL)
    shared.again(trial)
    shared.again(trial)
    assert shared.ask(2, X) is not None
    assert shared.ask(2, X) is None
    assert [one.state.name for one in shared.trials()] == ["FAIL", "RUNNING", "FAIL"]


def test_who_comes_after_an_outage_does_not_take_old_heartbeats_for_death(shared: Study, tmp_path: Path) -> None:
    assert shared.ask(1, X) is not None
    with sqlite3.connect(tmp_path / "search.db") as database:
        database.execute("UPDATE trial_heartbeats SET heartbeat = '2026-01-01 00:00:00'")
    late = Study(shared.arguments[0], "search", 30, sampler="random", pruner="nop")
    late.create("minimize", {})
    late.recover()
    late.recover()
    assert [one.state for one in shared.trials()] == [TrialState.RUNNING]


def test_what_waiting_does_not_help_against_is_an_error_at_once(shared: Study, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "search.db") as database:
        database.execute("ALTER TABLE trials RENAME TO migrated")
    with pytest.raises(LMSError, match=r"search\.db': .*no such table: trials.*The search cannot go on"):
        shared.ask(1, X)


@pytest.mark.parametrize(
    ("words", "passes"),
    [
        ('connection failed: FATAL:  password authentication failed for user "me"', False),
        ('connection failed: FATAL:  database "base" does not exist', False),
        ("(1045, \"Access denied for user 'me'@'host'\")", False),
        ("attempt to write a readonly database", False),
        ("connection failed: could not connect to server: Connection refused", True),
        ("connection failed: FATAL:  the database system is starting up", True),
        ("connection failed: FATAL:  sorry, too many clients already", True),
        ("database is locked", True),
    ],
)
def test_which_errors_pass(words: str, passes: bool) -> None:
    assert _passes(OperationalError("SELECT 1", None, Exception(words))) is passes


def test_an_error_after_which_optuna_asks_again_in_the_same_transaction_is_waited_out(
    shared: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(storage, "_PAUSE", 0)
    left = [InternalError, OperationalError]

    @sqlalchemy.event.listens_for(shared.storage.engine, "before_cursor_execute")
    def fail(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "FROM trials" in statement and left:
            kind = left.pop()
            try:
                raise sqlite3.Error("lock timeout" if left else "current transaction is aborted")
            except sqlite3.Error as error:  # the second one while the first one is handled, as drivers do
                raise kind(statement, None, error) from error

    assert shared.trials() == []
    assert not left
    said = capsys.readouterr().err
    assert "the database does not answer ((sqlite3.Error) lock timeout); waiting for it" in said
