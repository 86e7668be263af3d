"""The study in its database: which trials count, how it is opened, and patience while the database is away."""

from __future__ import annotations

import ast
import json
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any, Literal, ParamSpec, TypeVar

import optuna
import sqlalchemy
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from lms.console import say
from lms.errors import LMSError, UsageError
from lms.stats import format_seconds

Direction = Literal["minimize", "maximize"]
P = ParamSpec("P")
T = TypeVar("T")

AWAY = (StorageInternalError, sqlalchemy.exc.OperationalError, sqlalchemy.exc.InterfaceError)
OUTCOME = "lms:outcome"  # the user attribute that says why a trial has no value, if that is final

_SEARCH = "lms:search"
_DEATHS = "lms:deaths"  # the system attribute that says how often a trial's process has died before
_AGAIN = "lms:again"  # the system attribute that says which trial this one does again
_OPEN_TRIES = 5  # workers that make the tables at once get in each other's way
_PAUSE = 1.0  # seconds between tries
_NEWS = 60.0  # seconds between two words about a database that is away


def counts(trial: FrozenTrial) -> bool:
    """Whether a trial is one of those that were asked for: it is finished, or running, or infeasible.

    A trial that died does not count, because another does it again.
    """
    return trial.state != TrialState.FAIL or OUTCOME in trial.user_attrs


def check_url(url: str) -> None:
    """Refuse what is no database, or none that every worker sees. Raises UsageError."""
    wanted = "expected a database, such as sqlite:///search.db or postgresql://user@host/base"
    scheme, colon, _ = url.partition("://")
    if "journal" in scheme.lower() or scheme.startswith("redis"):
        raise UsageError(
            f"--storage={_shown(url)!r}: Optuna's journal has no heartbeats, so a trial whose worker was killed would "
            f"stay RUNNING in it for ever; {wanted}"
        )
    if not colon:
        raise UsageError(f"--storage={url!r}: no URL; {wanted}")
    if url in ("sqlite://", "sqlite:///") or ":memory:" in url:
        raise UsageError(f"--storage={url!r}: it would end with this process; {wanted}")


def chosen(module: ModuleType, noun: str, text: str) -> Any:
    """The sampler or pruner (`noun`) that `text` names: `tpe`, `TPESampler`, or `tpe:seed=1,multivariate=True`.

    Raises UsageError that lists the names.
    """
    unusable = ("base", "bruteforce", "grid", "partialfixed", "patient")  # they take objects, or end the study
    known = {one.removesuffix(noun).lower(): one for one in module.__all__ if one.endswith(noun)}
    known = {short: one for short, one in known.items() if not short.startswith(unusable)}
    name, _, rest = text.partition(":")
    option = f"--{noun.lower()}={text!r}"
    short = name.removesuffix(noun).lower()
    if short not in known:
        raise UsageError(f"{option}: unknown; Optuna has {', '.join(sorted(known))}")
    try:
        words = ast.parse(f"f({rest})", mode="eval").body
        assert isinstance(words, ast.Call)
        keywords = {word.arg or "": ast.literal_eval(word.value) for word in words.keywords}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            return getattr(module, known[short])(*map(ast.literal_eval, words.args), **keywords)
    except ImportError as error:
        raise UsageError(f"{option}: {error}") from None
    except (SyntaxError, TypeError, ValueError) as error:
        wanted = f"expected NAME or NAME:ARGUMENT=VALUE,... as {known[short]} takes them"
        raise UsageError(f"{option}: {error}; {wanted}") from None


class Study:
    """A study of Optuna's that several workers share. Its methods wait while the database is away."""

    def __init__(self, url: str, name: str, heartbeat: int, *, sampler: str, pruner: str) -> None:
        """`heartbeat` is in seconds; a trial without one for four times as long is taken for dead."""
        check_url(url)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.url, self.name = url, name
        self.grace = 4 * heartbeat
        self._samplers = chosen(optuna.samplers, "Sampler", sampler), chosen(optuna.pruners, "Pruner", pruner)
        self._storage = _opened(url, heartbeat, self.grace, self._lost)
        self.shown = _shown(url)
        self.patient = True  # False: methods raise one of AWAY instead of waiting
        self._seen: set[int] = set()  # the trials that were given a heartbeat, by their ids
        self._back = float("-inf")  # when the database came back

    def create(self, direction: Direction, search: Mapping[str, object]) -> None:
        """Make the study, or join it. `search` is JSON. Raises UsageError if the study searches something else."""
        sampler, pruner = self._samplers
        self._study = self.patiently(
            optuna.create_study,
            storage=self._storage,
            study_name=self.name,
            direction=direction,
            load_if_exists=True,
            sampler=sampler,
            pruner=pruner,
        )
        asked = json.loads(json.dumps({**search, "direction": direction}))
        found = self.patiently(lambda: self._study.user_attrs).get(_SEARCH)
        if found is None and not self.trials():
            self.patiently(self._study.set_user_attr, _SEARCH, asked)
        elif found != asked:
            there = {key: (found or {}).get(key, "nothing that lms tune wrote") for key in asked}
            different = [f"{key}: {there[key]} there, {asked[key]} asked" for key in asked if there[key] != asked[key]]
            raise UsageError(
                f"--study={self.name!r}: another search has this name ({'; '.join(different)}); give another --study"
            )

    def load(self, trial_id: int) -> Trial:
        """The running trial `trial_id`, in the process that does it."""
        sampler, pruner = self._samplers
        study = optuna.load_study(storage=self._storage, study_name=self.name, sampler=sampler, pruner=pruner)
        return Trial(study, trial_id)

    def patiently(self, work: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """What `work` returns, as soon as the database answers; says so if that takes long."""
        began = said = 0.0
        while True:
            try:
                result = work(*args, **keywords)
            except AWAY as error:
                if not self.patient:
                    raise
                now = time.monotonic()
                began = began or now
                if not said or now - said > _NEWS:
                    said = now
                    say(f"the database does not answer ({_reason(error)}); waiting for it, the trials go on")
                time.sleep(_PAUSE)
            else:
                if began:
                    self._back = time.monotonic()
                    say(f"the database answers again, after {format_seconds(self._back - began)}")
                return result

    @property
    def direction(self) -> StudyDirection:
        """Whether the metric is minimized or maximized."""
        return self.patiently(lambda: self._study.direction)

    def trials(self) -> list[FrozenTrial]:
        """All trials, as they are now."""
        return self.patiently(self._study.get_trials, deepcopy=False)

    def ask(self, wanted: int, distributions: dict[str, Any]) -> Trial | None:
        """A trial to do, of those that wait or a new one; None if `wanted` trials have a result or are being done."""
        trials = self.trials()
        waiting = any(one.state == TrialState.WAITING for one in trials)
        if not waiting and sum(map(counts, trials)) >= wanted:
            return None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Heartbeat of storage")  # the worker sends them
            try:
                trial = self.patiently(self._study.ask, distributions)
            except ImportError as error:  # cmaes and others, which Optuna imports when it needs them
                raise UsageError(f"--sampler: {error}") from None
        self.beat([trial])
        # Another worker may have asked for the last one in the same moment. The later number gives way.
        before = sum(one.number < trial.number and counts(one) for one in self.trials())
        if before >= wanted:
            self.tell(trial, TrialState.FAIL)
            return None
        return trial

    def beat(self, trials: Iterable[Trial]) -> None:
        """Say that these trials are being done."""
        for trial in trials:
            self.patiently(self._storage.record_heartbeat, trial._trial_id)

    def report(self, trial: Trial, value: float, step: int) -> None:
        """Record the metric's value at a step, for the pruner."""
        with suppress(UpdateFinishedTrialError):  # it was taken for dead, as `tell` will find
            self.patiently(trial.report, value, step)

    def should_prune(self, trial: Trial) -> bool:
        """Whether the pruner gives the trial up."""
        return self.patiently(trial.should_prune)

    def tell(self, trial: Trial, state: TrialState, value: float | None = None, outcome: str = "") -> bool:
        """Record how a trial ended, once; False if it had been taken for dead, so that another does it again.

        A trial that failed counts only with an `outcome`.
        """
        try:
            if outcome:
                self.patiently(trial.set_user_attr, OUTCOME, outcome)
            # If the answer to our first try was lost, the second finds that it is finished.
            told = self.patiently(self._study.tell, trial, value, state=state, skip_if_finished=True)
        except UpdateFinishedTrialError:
            return False
        return told.state == state

    def deaths(self, trial: FrozenTrial | Trial) -> int:
        """How often this trial's process has died before."""
        return int(self.patiently(self._storage.get_trial, trial._trial_id).system_attrs.get(_DEATHS, 0))

    def again(self, trial: FrozenTrial | Trial, *, died: bool) -> None:
        """Let a trial that has failed be done again with the same parameters, by any worker."""
        frozen = self.patiently(self._storage.get_trial, trial._trial_id)
        if OUTCOME in frozen.user_attrs:
            return  # it was decided; only its state was not told
        retry = optuna.create_trial(
            state=TrialState.WAITING,
            params=frozen.params,
            distributions=frozen.distributions,
            system_attrs={_DEATHS: self.deaths(frozen) + died, _AGAIN: frozen.number},
        )

        def add() -> None:
            # Another worker may have taken it for dead, or the answer to our first try was lost.
            if all(one.system_attrs.get(_AGAIN) != frozen.number for one in self._study.get_trials(deepcopy=False)):
                self._study.add_trial(retry)

        self.patiently(add)

    def recover(self) -> None:
        """Let the trials of dead workers be done again. The caller has just given its own a heartbeat.

        A worker that was killed before its trial's first heartbeat leaves a trial that Optuna never takes for dead. So
        each worker gives each trial of another, when it first sees it, one heartbeat.
        """
        if time.monotonic() < self._back + self.grace / 2:
            return  # the database was away: the other workers could not write to it either
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            self.patiently(optuna.storages.fail_stale_trials, self._study)
        for one in self.trials():
            if one.state == TrialState.RUNNING and one._trial_id not in self._seen:
                self._seen.add(one._trial_id)
                self.patiently(self._storage.record_heartbeat, one._trial_id)

    def _lost(self, _: optuna.Study, trial: FrozenTrial) -> None:
        say(f"trial {trial.number}: nothing was heard of its worker for {self.grace} s")
        self.again(trial, died=False)


def _opened(url: str, heartbeat: int, grace: int, lost: Callable[[optuna.Study, FrozenTrial], None]) -> RDBStorage:
    sqlite = url.startswith("sqlite")
    settings: dict[str, Any] = {"connect_args": {"timeout": 5}} if sqlite else {"pool_pre_ping": True}
    for left in reversed(range(_OPEN_TRIES)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                storage = RDBStorage(
                    url,
                    settings,
                    heartbeat_interval=heartbeat,
                    grace_period=grace,
                    heartbeat_stale_trial_callback=lost,
                )
            break
        except ImportError as error:
            raise UsageError(f"--storage={_shown(url)!r}: {error} Install the driver, such as psycopg") from None
        except (sqlalchemy.exc.ArgumentError, sqlalchemy.exc.NoSuchModuleError) as error:
            raise UsageError(f"--storage={_shown(url)!r}: {_reason(error)}") from None
        except (*AWAY, sqlalchemy.exc.DBAPIError) as error:
            if not left:
                raise LMSError(f"--storage={_shown(url)!r}: it cannot be opened: {_reason(error)}") from None
            time.sleep(_PAUSE)
    if sqlite:
        # Python's driver begins a transaction at its first write. Two workers would both read that a trial is free.
        sqlalchemy.event.listen(storage.engine, "connect", _no_implicit_begin)
        sqlalchemy.event.listen(storage.engine, "begin", _begin_immediate)
        storage.engine.dispose()
    return storage


def _no_implicit_begin(connection: Any, _: object) -> None:
    connection.isolation_level = None


def _begin_immediate(connection: Any) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _shown(url: str) -> str:
    try:
        return sqlalchemy.engine.make_url(url).render_as_string()  # without its password
    except sqlalchemy.exc.ArgumentError:
        return url.partition("://")[0] + "://..."


def _reason(error: BaseException) -> str:
    inner = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
    return str(inner).strip().splitlines()[0]
