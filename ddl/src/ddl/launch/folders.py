"""Folders under names that mpirun can read."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PLAIN = re.compile(r"[\w./-]*", re.ASCII)


@contextmanager
def readable(folder: Path) -> Iterator[Path]:
    """A name of `folder` that mpirun can read, for as long as it needs it: a link in /tmp where its own is none.

    Open MPI 5.0.11 takes "pe", in either case and anywhere in a rank file's path, for the option PE= of --map-by, which
    forbids --bind-to. So nobody named Peter could start a job, nor 1 in 200 of those with a random name. A comma or a
    colon ends a path for it. A blank does not; but only plain names are known to be read by every mpirun.
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
