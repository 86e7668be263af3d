"""Sums over the ranks of a job. Each rank has a share of the rows. One process alone adds nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bascule_glm.errors import DataError, GLMError

_WORDS = 1000  # bytes of an error that the other ranks repeat


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks. ddl is imported only if there are several."""

    rank: int = 0
    size: int = 1

    def add(self, array: NDArray[Any]) -> NDArray[Any]:
        """The sum over the ranks, with the same bits on each. Raises DDL's errors, which name a dead rank."""
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

    @contextmanager
    def agree(self) -> Iterator[None]:
        """Work that a rank does alone. If it fails on one, that rank raises its error, and the others DataError.

        Without this the others would wait for it in their next sum.
        """
        failed, said = None, b""
        try:
            yield
        except Exception as error:
            failed, said = error, (str(error) or repr(error)).encode()[:_WORDS]
        everyone = self.gather(np.frombuffer(said.ljust(_WORDS, b"\0"), dtype=np.uint8))
        if failed is not None:
            raise failed
        for rank in np.flatnonzero(everyone.any(axis=1)).tolist():
            words = bytes(everyone[rank]).rstrip(b"\0").decode(errors="ignore")
            raise DataError(f"rank {rank} cannot fit its rows: {words}")

    def agree_on_features(self, n_features: int, names: Iterable[str] | None) -> None:
        """Raises DataError on every rank if the shares have different features; it names two ranks.

        Names are compared between the ranks that have any.
        """
        key = 0 if names is None else int.from_bytes(hashlib.sha256(repr([*map(str, names)]).encode()).digest()[:7])
        found, keys = self.gather(np.array([n_features, key])).T
        if (found != found[0]).any():
            other = int(np.flatnonzero(found != found[0])[0])
            raise DataError(
                f"rank 0 has {found[0]} features and rank {other} has {found[other]}: give every rank the same columns "
                "(for svmlight files: convert(..., n_features=...))"
            )
        named = np.flatnonzero(keys)
        if len(other := named[keys[named] != keys[named[:1]]]):
            raise DataError(f"ranks {named[0]} and {other[0]} differ in the columns or their order: give all the same")


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
