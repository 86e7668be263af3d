"""Write: the folder of a run, under a name that mpirun can read."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddl.launch.command import Launch
from ddl.launch.counts import quoted
from ddl.launch.decide import Job
from ddl.launch.errors import UsageError

KEPT_RUNS = 50  # folders of earlier runs

_PLAIN = re.compile(r"[\w./-]*", re.ASCII)


@contextmanager
def readable(folder: Path) -> Iterator[Path]:
    """Yields a name of `folder` that mpirun can read: its own, or else a link in /tmp that lives as long as the `with`.

    Open MPI 5.0.11 takes "pe", in either case and anywhere in a rank file's path, for the option PE= of --map-by, which
    forbids --bind-to. So nobody named Peter could start a job, and 1 in 200 random names would fail. A comma or a colon
    ends a path for it. A blank does not, but only plain names are known to work with every mpirun.
    """
    if _PLAIN.fullmatch(str(folder)) and "pe" not in str(folder).lower():
        yield folder
        return
    link = Path("/tmp", f"ddlrun-{secrets.token_hex(8)}")  # hexadecimal digits spell no "pe"
    link.symlink_to(folder, target_is_directory=True)
    try:
        yield link
    finally:
        link.unlink(missing_ok=True)


def name(parent: Path | None) -> Path:
    """The folder for the files of this run: below `parent`, else in the user's folder for state."""
    if parent is None:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        parent = Path(state, "ddlrun")
    return parent.absolute() / f"{time.strftime('%Y-%m-%d_%H%M%S')}_{os.getpid()}"


def write(folder: Path, launch: Launch, job: Job) -> None:
    """Write mpirun's files, the command, the reasons and the hosts, readable by this user alone.

    Keeps the newest KEPT_RUNS folders of runs. Raises UsageError if a file cannot be written.
    """
    machines = {name: one.to_dict() for name, one in job.found.machines.items()}
    files = {
        **launch.files,
        "command": f"{launch}\n",
        "reasons": "".join(f"{subject}: {text}\n" for subject, text in job.reasons),
        "hosts.json": json.dumps(machines, indent=1) + "\n",
    }
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        for name, text in files.items():
            aside = folder / f".{name}"
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(text)
            aside.rename(folder / name)
        for old in sorted(one for one in folder.parent.iterdir() if one.is_dir())[:-KEPT_RUNS]:
            if (old / "rankfile").is_file() and (old / "command").is_file():  # one of ours
                shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise UsageError(
            f"--log-dir={quoted(str(folder.parent))}: {error.strerror}; expected a folder that can be written to"
        ) from None
