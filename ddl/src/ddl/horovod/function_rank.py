"""`python -m ddl.horovod.function_rank FOLDER`: a rank of a job that `ddl.horovod.run` has started."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from multiprocessing import spawn
from pathlib import Path

from ddl.horovod import function_job


def main(folder: Path) -> None:
    """Call the function, and leave there what it returns."""
    function_job.is_rank = True
    try:
        preparation, content = pickle.loads((folder / function_job.TASK).read_bytes())
    except FileNotFoundError:
        sys.exit(
            f"ddl.horovod.run: host {socket.gethostname()} has no {folder}: set TMPDIR to a folder that all hosts share"
        )
    spawn.prepare(preparation)  # the script's path, arguments and names, which the function is one of
    function, args, kwargs = pickle.loads(content)
    result = pickle.dumps(function(*args, **kwargs))
    (folder / function_job.RESULT.format(rank=os.environ["RANK"])).write_bytes(result)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
