"""A study that several workers share: which trials count, who does one, and what becomes of those that died."""

from __future__ import annotations

import ast
import json
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, Literal

import optuna
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState

from lms.console import say
from lms.errors import UsageError
from lms.tune.storage import opened, shown

Direction = Literal["minimize", "maximize"]

MOST_DEATHS = 3  # of one trial's process or worker; then it has failed
OUTCOME = "lms:outcome"  # the user attribute that says why a trial has no value, if that is final

_SEARCH = "lms:search"
_DEATHS = "lms:deaths"  # the system attribute that says how often a trial or its worker has died before
_AGAIN = "lms:again"  # the system attribute that says which trial, the first that died, this one does again
_PATIENCE = 60.0  # seconds: the database may be away, or its address wrong


def counted(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Those of a study's trials, given in order, that were asked for: they wait, run, or have ended with a result.

    A trial that died does not count, because another does it again. Of several that do the same one again only one
    counts: two workers may both have found it dead, or a database's answer was lost and the question came again.
    """
    found: dict[int, FrozenTrial] = {}  # by the first that died, or by itself
    for one in trials:
        died = one.state == TrialState.FAIL and OUTCOME not in one.user_attrs
        if not died:
            found.setdefault(one.system_attrs.get(_AGAIN, one.number), one)
    return list(found.values())


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
        return getattr(module, known[short])(*map(ast.literal_eval, words.args), **keywords)
    except ImportError as error:
        raise UsageError(f"{option}: {error}") from None
    except (SyntaxError, TypeError, ValueError) as error:
        wanted = f"expected NAME or NAME:ARGUMENT=VALUE,... as {known[short]} takes them"
        raise UsageError(f"{option}: {error}; {wanted}") from None


class Study:
    """A study of Optuna's that several workers share. Its methods wait while the database is away.

    They raise LMSError if waiting does not help.
    """

    def __init__(
        self, url: str, name: str, heartbeat: int, sampler: str, pruner: str, *, patience: float = _PATIENCE
    ) -> None:
        """`heartbeat` is in seconds; a trial without one for four times as long is taken for dead.

        A database that is away is waited for, `patience` seconds. Raises UsageError, LMSError.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.simplefilter("ignore", ExperimentalWarning)  # heartbeats, and some samplers
        self.arguments = url, name, heartbeat, sampler, pruner  # for the process of a trial
        self.name, self.heartbeat, self.grace = name, heartbeat, 4 * heartbeat
        self._settings: dict[str, Any] = {
            "study_name": name,
            "sampler": chosen(optuna.samplers, "Sampler", sampler),
            "pruner": chosen(optuna.pruners, "Pruner", pruner),
        }
        self.storage = opened(url, heartbeat, self.grace, self._lost, patience=patience)
        self.shown = shown(url)
        self._seen: set[int] = set()  # the trials that were given a heartbeat, by their ids
        self._looked = float("-inf")  # when we last looked for trials of dead workers

    def create(self, direction: Direction, search: Mapping[str, object]) -> None:
        """Make the study, or join it. `search` is JSON. Raises UsageError if the study searches something else."""
        self._study = optuna.create_study(
            storage=self.storage, direction=direction, load_if_exists=True, **self._settings
        )
        self.direction = self._study.direction
        asked = json.loads(json.dumps({**search, "direction": direction}))
        found = self._study.user_attrs.get(_SEARCH)
        if found is None and not self.trials():
            self._study.set_user_attr(_SEARCH, asked)
        elif found != asked:
            there = {key: (found or {}).get(key, "nothing that lms tune wrote") for key in asked}
            different = [f"{key}: {there[key]} there, {asked[key]} asked" for key in asked if there[key] != asked[key]]
            raise UsageError(
                f"--study={self.name!r}: another search has this name ({'; '.join(different)}); give another --study"
            )

    def load(self, trial_id: int) -> Trial:
        """The running trial `trial_id`, in the process that does it."""
        return Trial(optuna.load_study(storage=self.storage, **self._settings), trial_id)

    def trials(self) -> list[FrozenTrial]:
        """All trials, as they are now."""
        return self._study.get_trials(deepcopy=False)

    def ask(self, wanted: int, distributions: dict[str, Any]) -> Trial | None:
        """A trial to do, of those that wait or a new one; None if `wanted` trials have a result or are being done."""
        trials = self.trials()
        waiting = any(one.state == TrialState.WAITING for one in trials)
        if not waiting and len(counted(trials)) >= wanted:
            return None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Heartbeat of storage")  # the worker sends them
            try:
                trial = self._study.ask(distributions)
            except ImportError as error:  # cmaes and others, which Optuna imports when it needs them
                raise UsageError(f"--sampler: {error}") from None
        self.beat([trial])
        # Another worker may have asked for the last one in the same moment. The later number gives way.
        found = counted(self.trials()[: trial.number + 1])
        if len(found) > wanted or trial.number not in [one.number for one in found]:
            self.tell(trial, TrialState.FAIL)
            return None
        return trial

    def beat(self, trials: Iterable[Trial]) -> None:
        """Say that these trials are being done."""
        for trial in trials:
            self.storage.record_heartbeat(trial._trial_id)

    def report(self, trial: Trial, value: float, step: int) -> None:
        """Record the metric's value at a step, for the pruner."""
        with suppress(UpdateFinishedTrialError), warnings.catch_warnings():  # another took it for dead: `tell` says so
            warnings.filterwarnings("ignore", "The reported value is ignored")  # said again by a trial tried alone
            trial.report(value, step)

    def tell(self, trial: Trial, state: TrialState, value: float | None = None, outcome: str = "") -> bool:
        """Record how a trial ended, once; False if it had been taken for dead, so that another does it again.

        A trial that failed counts only with an `outcome`.
        """
        if self.storage.get_trial(trial._trial_id).state.is_finished():
            return False
        with suppress(UpdateFinishedTrialError):  # taken for dead, or told: the answer to our first try was lost
            if outcome:
                trial.set_user_attr(OUTCOME, outcome)
            self._study.tell(trial, value, state=state, skip_if_finished=True)
        return self.storage.get_trial(trial._trial_id).state == state

    def again(self, trial: FrozenTrial | Trial, died: str = "") -> None:
        """Let a trial that has failed be done again with the same parameters, by any worker.

        `died`: how its process or its worker did, which a trial may do MOST_DEATHS times. Then it has failed.
        """
        frozen = self.storage.get_trial(trial._trial_id)
        if OUTCOME in frozen.user_attrs:
            return  # it was decided; only its state was not told
        deaths = frozen.system_attrs.get(_DEATHS, 0) + bool(died)
        outcome = f"failed: {died}, {deaths} times" if deaths > MOST_DEATHS else ""
        if died:
            say(f"trial {frozen.number}: {outcome or f'{died}; it will be done again'}")
        self._study.add_trial(
            optuna.create_trial(
                state=TrialState.FAIL if outcome else TrialState.WAITING,
                params=frozen.params,
                distributions=frozen.distributions,
                user_attrs={OUTCOME: outcome} if outcome else {},
                system_attrs={_DEATHS: deaths, _AGAIN: frozen.system_attrs.get(_AGAIN, frozen.number)},
            )
        )

    def recover(self) -> None:
        """Let the trials of dead workers be done again. The caller has just given its own a heartbeat.

        Each worker gives each trial of another, when it first sees it, one heartbeat: a worker that was killed before
        its trial's first one leaves a trial that Optuna never takes for dead. All trials get one if it is long ago
        that we looked: the database may have been away, and then nobody could write to it.
        """
        now = time.monotonic()
        if now - self._looked > self.grace / 2:
            self._seen.clear()
        self._looked = now
        for one in self.trials():
            if one.state == TrialState.RUNNING and one._trial_id not in self._seen:
                self._seen.add(one._trial_id)
                self.storage.record_heartbeat(one._trial_id)
        if time.monotonic() - now < self.grace / 2:
            optuna.storages.fail_stale_trials(self._study)

    def _lost(self, _: optuna.Study, trial: FrozenTrial) -> None:
        self.again(trial, f"nothing was heard of its worker for {self.grace} s")
