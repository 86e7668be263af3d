"""Joins and leaves, N times, and prints how long the joining took. It needs nothing but libddl: it starts quickly.

Usage: start.py LIBDDL [N]
"""

import ctypes
import sys
import time

library = ctypes.CDLL(sys.argv[1])
library.ddl_last_error.restype = ctypes.c_char_p
for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 1):
    began = time.monotonic()
    if library.ddl_init(None) != 0:
        sys.exit(library.ddl_last_error().decode())
    took = time.monotonic() - began
    rank = ctypes.c_int()
    library.ddl_rank(None, ctypes.byref(rank))
    print(f"rank {rank.value} joined after {took:.3f} s", flush=True)
    library.ddl_finalize()
