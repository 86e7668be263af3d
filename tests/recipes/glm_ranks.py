"""Two ranks fit their halves of a data set; the result is the optimum of all rows."""

import numpy as np

import ddl
from bascule_glm import LogisticRegression

ddl.init()
generator = np.random.default_rng(0)
x = generator.normal(size=(4000, 20))
y = x[:, 0] + generator.normal(size=len(x)) > 0
mine = slice(ddl.rank(), None, ddl.size())
together = LogisticRegression(tol=1e-8, distributed=True).fit(x[mine], y[mine])
alone = LogisticRegression(tol=1e-8).fit(x, y)
assert ddl.size() == 2
assert abs(together.objective_ - alone.objective_) <= max(together.gap_, alone.gap_)
