"""Sums over the ranks of a job, each of which has a share of the rows. One process alone adds nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bascule_glm.errors import DataError, GLMError


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks. ddl is imported only if there are several."""

    rank: int = 0
    size: int = 1

    def add(self, array: NDArray[Any]) -> NDArray[Any]:
        """The sum over the ranks, in place, with the same bits on each. Raises DDL's errors, which name a dead rank."""
        if self.size == 1:
            return array
        import ddl

        total: NDArray[Any] = ddl.allreduce(np.ascontiguousarray(array))
        return total

    def gather(self, array: NDArray[Any]) -> NDArray[Any]:
        """Everyone's `array` of one shape, stacked: (size, ...)."""
        if self.size == 1:
            return np.expand_dims(array, 0)
        import ddl

        everyone: NDArray[Any] = ddl.allgather(np.ascontiguousarray(array))
        return everyone

    def union(self, values: NDArray[Any]) -> NDArray[Any]:
        """The sorted distinct numbers that any rank has."""
        found = np.unique(np.asarray(values, dtype=np.float64))
        longest = int(self.gather(np.array([len(found)])).max())
        padded = np.resize(found, longest) if len(found) else np.full(longest, np.nan)
        together: NDArray[Any] = np.unique(self.gather(padded))
        distinct: NDArray[Any] = together[~np.isnan(together)]
        return distinct

    def agree_on_features(self, n_features: int) -> None:
        """Raises DataError on every rank if the shares have different numbers of features; it names two ranks."""
        found = self.gather(np.array([n_features])).ravel()
        if (found != found[0]).any():
            other = int(np.flatnonzero(found != found[0])[0])
            raise DataError(
                f"rank 0 has {found[0]} features and rank {other} has {found[other]}: give every rank the same columns "
                "(for svmlight files: convert(..., n_features=...))"
            )


ALONE = Ranks()


def ranks(distributed: bool) -> Ranks:
    """All ranks of DDL's job if `distributed`, else this process alone.

    Raises GLMError if ddl is not installed, and DDL's errors if there is no job to join.
    """
    if not distributed:
        return ALONE
    try:
        import ddl
    except ImportError as error:
        raise GLMError(f"distributed=True needs the package bascule-ddl ({error}): install it") from error
    if not ddl.is_initialized():
        ddl.init()
    return Ranks(ddl.rank(), ddl.size())
