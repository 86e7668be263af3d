"""The program of a trial of an objective file: calls `objective(trial)` and prints what it returns."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NoReturn

import optuna

from lms.errors import LMSError
from lms.tune.study import AWAY, Study
from lms.tune.trial import DATABASE_AWAY

VARIABLE = "LMS_TUNE_TRIAL"  # the environment variable that says which trial: a password in the URL is not for `ps`
PRUNED = "lms tune: pruned"


def environment(study: Study, trial_id: int, heartbeat: int, sampler: str, pruner: str) -> dict[str, str]:
    """What the process of a trial needs to know, as variables."""
    return {VARIABLE: json.dumps([study.url, study.name, heartbeat, sampler, pruner, trial_id])}


def main() -> None:
    """Do the trial."""
    url, name, heartbeat, sampler, pruner, trial_id = json.loads(os.environ[VARIABLE])
    path = Path(sys.argv[1]).absolute()
    sys.path.insert(0, str(path.parent))
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    try:
        trial = Study(url, name, heartbeat, sampler=sampler, pruner=pruner).load(trial_id)
    except (*AWAY, LMSError) as error:
        _database_away(error)
    try:
        value = float(module.objective(trial))
    except optuna.TrialPruned:
        print(f"\n{PRUNED}")
    except AWAY as error:
        _database_away(error)
    else:
        print(f"\nlms tune: value {value!r}")


def _database_away(error: Exception) -> NoReturn:
    print(f"the database does not answer: {error}", file=sys.stderr)
    sys.exit(DATABASE_AWAY)


if __name__ == "__main__":
    main()
