"""Each rank forks a child that ends through Python's exit handlers: the child is not a rank, and the ranks go on."""

import os
import sys
from collections.abc import Callable
from ctypes import byref, c_int, c_void_p

import numpy as np

import ddl
from ddl import library


def is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except ddl.StateError as error:
        return "was forked by a rank" in str(error)
    return False


def is_finished() -> None:
    """Ask for the request; what is said where that is refused is 0."""
    finished = c_int(7)
    try:
        library.call("ddl_test", byref(request), byref(finished))
    finally:
        assert finished.value == 0


ddl.init()
assert (ddl.allreduce(np.ones(10, np.float32), "sum") == ddl.size()).all()
request = c_void_p()
library.call("ddl_ibarrier", None, byref(request))
child = os.fork()
if child == 0:
    sys.exit(5 if all(map(is_refused, (ddl.init, ddl.rank, ddl.barrier, is_finished))) else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 5, status
library.call("ddl_wait", byref(request))
for count in (10, 100_000):
    assert (ddl.allreduce(np.ones(count, np.float32), "sum") == ddl.size()).all()
ddl.barrier()
if ddl.rank() == 0:
    print("right", flush=True)
