"""MPI's ranks cannot shrink, and go on as they were."""

import numpy as np

import ddl

ddl.init()
try:
    ddl.shrink()
except ddl.UnsupportedError as error:
    print(f"UnsupportedError: {error}", flush=True)
print(f"still {ddl.allreduce(np.ones(1))[0]}", flush=True)
