"""Ranks average an array whose length no number of ranks divides, and check each element."""

import numpy as np

import ddl

ddl.init()
values = (ddl.rank() + 1) * np.arange(10007, dtype=np.float64)
ddl.allreduce(values, op="average")
assert ddl.size() == 4
assert (values == 2.5 * np.arange(10007)).all(), values
