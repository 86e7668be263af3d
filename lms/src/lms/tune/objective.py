"""The program of a trial of an objective file: calls `objective(trial)` and prints what it returns."""

from __future__ import annotations

import json
import math
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import optuna

from lms.tune.study import Study

VARIABLE = "LMS_TUNE_TRIAL"  # the environment variable that says which trial: a password in the URL is not for `ps`
PRUNED = "lms tune: pruned"


def environment(study: Study, trial_id: int) -> dict[str, str]:
    """What the process of a trial needs to know, as variables."""
    return {VARIABLE: json.dumps([*study.arguments, trial_id])}


def main() -> None:
    """Do the trial."""
    *arguments, trial_id = json.loads(os.environ[VARIABLE])
    path = Path(sys.argv[1]).absolute()
    sys.path.insert(0, str(path.parent))
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    # However long the database is away, the worker waits for it too. First, because the file may go to another folder,
    # and the URL may be relative.
    trial = Study(*arguments, patience=math.inf).load(trial_id)
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    try:
        value = float(module.objective(trial))
    except optuna.TrialPruned:
        print(f"\n{PRUNED}")
    else:
        print(f"\nlms tune: value {value!r}")


if __name__ == "__main__":
    main()
