"""What must work in an environment as soon as it is installed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bundle import install, pip
from bundle.errors import InstallError
from bundle.progress import say

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


@dataclass(frozen=True)
class Check:
    """A program that must end well in the environment, if that has the package `needs`."""

    says: str
    needs: str
    command: tuple[str, ...]


CHECKS = (
    Check("bascule info", "bascule-tools", ("bascule", "info")),
    Check("lms --version", "lms", ("lms", "--version")),
    Check("an allreduce of two ranks under ddlrun", "ddl", ("ddlrun", "-np", "2", "python", "-c", _SUM)),
    Check("three steps with swapped tensors", "lms-torch", ("python", "-c", _STEP)),
    Check("TensorFlow multiplies", "tensorflow",
          ("python", "-c", "import tensorflow as t; assert t.linalg.matmul([[2.0]], [[3.0]]).numpy() == 6")),
)  # fmt: skip


def run(prefix: Path, names: Sequence[str]) -> None:
    """Run the checks that the packages `names` allow, pip's of the dependencies, and that no file is two packages'.

    Raises InstallError with the output of what failed.
    """
    if both := install.clobbered(prefix):
        raise InstallError(f"{prefix}: two packages hold the same files: {', '.join(both[:10])}")
    for check in CHECKS:
        if check.needs in names:
            _must(check.says, check.command, prefix)
    _must("pip check", [*pip.command(prefix / "bin/python"), "check"], prefix)


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
        raise InstallError(
            f"{prefix} is installed, but there {says} fails with status {done.returncode}: {shlex.join(command)}\n"
            f"{(done.stdout + done.stderr).strip()[-3000:]}"
        )
    say(f"works: {says}")
