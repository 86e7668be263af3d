"""How much memory a fit may take, of what its user allows this process."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from bascule_glm.errors import DataError
from bascule_glm.files import READ_AHEAD, WIDE, FileRows
from bascule_glm.objective import Problem
from lms.memory.machine import memory_room
from lms.memory.resident import ResidentSet
from lms.ranks import sharing
from lms.units import format_size, parse_size

_SHARE = 0.5  # of what the machine has available, for all ranks on it, if no limit is given
_SPARE = 0.05  # of `work`: BLAS and threads take memory when they are first used
_COPIES = 3  # of data in memory: itself, scikit-learn's own copy, and its products with weights


@dataclass(frozen=True)
class Budget:
    """`work` bytes may be taken by data and buffers, beside what the process holds already. `limit` as it was asked."""

    limit: str
    work: int

    def holds(self, rows: FileRows) -> bool:
        """Whether scikit-learn can fit these rows in memory."""
        return rows.nbytes * _COPIES <= self.work and rows.entries < WIDE

    def held(self, rows: FileRows, problem: Problem, cholesky: bool) -> int:
        """Bytes of rows that may stay in memory. Raises DataError if not even one block fits."""
        outputs, columns = problem.loss.outputs, problem.columns(rows.n_features)
        fixed = max(READ_AHEAD, 3 * rows.largest_block) + 3 * rows.largest_block  # read ahead; float64, and its scores
        fixed += outputs * columns * 8 * (40 + (3 * columns if cholesky else 0))  # L-BFGS's pairs; matrices and factors
        of_a_row = rows.nbytes / rows.n_rows
        # Of sparse rows a sample (half of them or fewer) and a tenth of it are copies. Each row has two weights and its
        # derivatives.
        copied = 1.1 / max(problem.ranks.size, 2) if rows.sparse else 0
        of_a_byte = 1 + copied + (16 + 40 * outputs) / of_a_row
        least = math.ceil((rows.largest_block * of_a_byte + fixed) / (1 - _SPARE))
        if self.work < least:
            more = 1.01 * (least - self.work)  # `format_size` rounds to three digits
            raise DataError(
                f"limit={self.limit}: {format_size(max(self.work, 0))} are left in this process; the fit "
                f"needs {format_size(least)}, with one block of {format_size(rows.largest_block)}: "
                f"raise the limit by {format_size(more)} or more"
            )
        return int(((1 - _SPARE) * self.work - fixed) / of_a_byte)


def budget(limit: int | str | None) -> Budget:
    """What `limit` leaves: bytes or a size such as "2GB" that this process may hold in all. Raises ValueError."""
    if limit is None:
        work = memory_room(_SHARE) // sharing(os.environ)
        return Budget(f"None ({format_size(work)})", work)
    return Budget(repr(limit), parse_size(limit, "limit") - ResidentSet().current())
