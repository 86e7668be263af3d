"""A worker whose trials are programs without a framework: `worker_program.py URL TRIALS AT_ONCE PROGRAM PRUNER`."""

import sys
from pathlib import Path

from lms.tune.metric import named
from lms.tune.parameters import Parameter
from lms.tune.study import Study
from lms.tune.worker import Search, Worker

url, trials, at_once, program, pruner = sys.argv[1:]
study = Study(url, "search", 1, sampler="random", pruner=pruner)
study.create("minimize", {"parameters": "x"})
Worker(
    study,
    Search(
        trials=int(trials),
        at_once=int(at_once),
        parameters=[Parameter.parse("x=uniform:0:1")],
        metric="loss",
        pattern=named("loss"),
        pruned=None,
        logs=Path("logs"),
        gently=False,
        command=lambda trial, _: ([sys.executable, "-S", program, str(trial.params["x"])], {}),
    ),
).run()
