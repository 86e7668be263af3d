"""A Parquet file fitted in memory, and within a limit that it does not fit into: the same objective."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bascule_glm import LogisticRegression, convert
from lms.memory.resident import ResidentSet

generator = np.random.default_rng(0)
x = generator.normal(size=(200_000, 64)).astype(np.float32)
y = x[:, 0] + generator.normal(size=len(x)) > 0
pq.write_table(pa.table({f"x{j}": x[:, j] for j in range(64)} | {"y": y}), "rows.parquet")
rows = convert("rows.parquet", label="y")
inside = LogisticRegression(tol=1e-6, limit="100GB").fit(rows)
outside = LogisticRegression(tol=1e-6, limit=ResidentSet().current() + (60 << 20), verbose=1).fit(rows)
assert "do not fit" in outside.solver_.reason, outside.solver_
assert abs(inside.objective_ - outside.objective_) <= max(inside.gap_, outside.gap_)
