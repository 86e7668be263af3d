"""Linear models larger than memory, with a certificate of how far from the optimum they are.

from bascule_glm import LogisticRegression

model = LogisticRegression(limit="2GB", verbose=1).fit("train.parquet", "label")

The fitted model's `objective_` is at most `gap_` above the optimum.
"""

from bascule_glm.certified import Solver
from bascule_glm.errors import DataError, FileError, GLMError, ScaleWarning
from bascule_glm.estimators import LinearSVC, LogisticRegression, Ridge
from bascule_glm.files import FileRows
from bascule_glm.solver import Pass
from bascule_glm.sources import convert, open_rows

__version__ = "0.1.0"

__all__ = [
    "DataError",
    "FileError",
    "FileRows",
    "GLMError",
    "LinearSVC",
    "LogisticRegression",
    "Pass",
    "Ridge",
    "ScaleWarning",
    "Solver",
    "convert",
    "open_rows",
]
