"""What must work in an environment as soon as it is installed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bundle import install
from bundle.errors import BundleError
from bundle.process import say

_SUM = """
import ddl, numpy
ddl.init()
values = numpy.full(3, ddl.rank() + 1.0)
ddl.allreduce(values)
assert (values == 3).all()
"""
_STEP = """
import lms, torch
model = torch.nn.Sequential(*(torch.nn.Conv2d(1, 1, 3, padding=1) for _ in range(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with lms.LMS(model, optimizer, budget="3MB") as session:
    for _ in range(3):
        model(torch.ones(1, 1, 512, 512)).sum().backward()
        optimizer.step()
assert session.stats()["swapped_in"] > 0
"""
_FIT = """
import keras, numpy
model = keras.Sequential([keras.Input((512,)), *(keras.layers.Dense(512, activation="tanh") for _ in range(8))])
model.compile("sgd", "mse", jit_compile=False)
def fit(*callbacks):
    return model.fit(numpy.ones((1024, 512)), numpy.ones((1024, 512)), batch_size=512, verbose=0, callbacks=callbacks)
"""
_SWAPS = (
    _FIT
    + """
import lms.build, lms.errors, lms.tensorflow
try:
    compiler = lms.build.compiler()
except lms.errors.LMSError:
    compiler = None
if compiler:
    lms.build.build(lms.build.OPERATIONS)
try:
    callback = lms.tensorflow.LMS(budget=0)
    fit(callback)
    assert callback.stats()["swapped_in"] > 0
except lms.errors.LMSError as error:
    assert not compiler and "python -m lms.build tensorflow" in str(error), error
"""
)
_RANKS = (
    _FIT
    + """
import ddl.keras as ddl
ddl.init()
assert ddl.size() == 2
model.optimizer = ddl.DistributedOptimizer(model.optimizer)
fit(ddl.DDLCallback(), ddl.DDLGlobalVariablesCallback())
sums = ddl.allgather_object([float(one.sum()) for one in model.get_weights()])
assert sums[0] == sums[1]
"""
)


@dataclass(frozen=True)
class Check:
    """A program that must end well in the environment, if that has the package `needs`."""

    says: str
    needs: str
    command: tuple[str, ...]


CHECKS = (
    Check("bascule info", "bascule-tools", ("bascule", "info")),
    Check("lms --version", "bascule-lms", ("lms", "--version")),
    Check("an allreduce of two ranks under ddlrun", "bascule-ddl", ("ddlrun", "-np", "2", "python", "-c", _SUM)),
    Check("three steps with swapped tensors", "bascule-lms-torch", ("python", "-c", _STEP)),
    Check("a Keras fit with swapped tensors, or the error that asks for a compiler", "bascule-tensorflow",
          ("python", "-c", _SWAPS)),
    Check("a Keras fit on two ranks", "bascule-tensorflow", ("ddlrun", "-np", "2", "python", "-c", _RANKS)),
)  # fmt: skip


def run(prefix: Path, names: Sequence[str]) -> None:
    """Run the checks that the packages `names` allow, pip's of the dependencies, and that no file is two packages'.

    Raises BundleError with the output of what failed.
    """
    if both := install.clobbered(prefix):
        raise BundleError(f"{prefix}: two packages hold the same files: {', '.join(both[:10])}")
    for check in CHECKS:
        if check.needs in names:
            _must(check.says, check.command, prefix)
    install.pip(prefix, "check")
    say("works: pip check")


def environment(prefix: Path) -> Mapping[str, str]:
    """The variables of a shell in which the environment at `prefix` is activated."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return inherited | {
        "PATH": f"{prefix / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "CONDA_PREFIX": str(prefix),
    }


def _must(says: str, command: Sequence[str], prefix: Path) -> None:
    variables = environment(prefix)
    program = shutil.which(command[0], path=variables["PATH"]) or command[0]
    done = subprocess.run(
        [program, *command[1:]], env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=prefix
    )
    if done.returncode:
        raise BundleError(
            f"{prefix} is installed, but there {says} fails with status {done.returncode}: {shlex.join(command)}\n"
            f"{(done.stdout + done.stderr).strip()[-3000:]}"
        )
    say(f"works: {says}")
