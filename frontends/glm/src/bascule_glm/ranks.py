"""Sums over the ranks of a job. Each rank has a share of the rows. One process alone adds nothing."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
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
        """The sum over the ranks, with the same bits on each. Raises DDL's errors, which name a dead rank."""
        if self.size == 1:
            return array
        import ddl

        return np.asarray(ddl.allreduce(np.ascontiguousarray(array)))

    def gather(self, value: Any) -> list[Any]:
        """Everyone's `value`, rank by rank."""
        if self.size == 1:
            return [value]
        import ddl

        content = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
        longest = int(ddl.allgather(np.array([content.size])).max())
        padded = ddl.allgather(np.resize(content, longest))
        return [pickle.loads(one.tobytes()) for one in padded]  # a pickle tells its own end

    def union(self, values: NDArray[Any]) -> NDArray[Any]:
        """The sorted distinct numbers that any rank has. Raises DataError for what is no number."""
        with self.agree():
            if values.dtype.kind not in "biuf":
                raise DataError(f"labels are {values.dtype}: between ranks they must be numbers, so encode them alike")
            found = np.unique(values.astype(np.float64))
        return np.unique(np.concatenate(self.gather(found)))

    @contextmanager
    def agree(self) -> Iterator[None]:
        """Work that a rank does alone. If it fails on one, that rank raises its error, and the others DataError.

        Without this the others would wait for it in their next sum.
        """
        failed = None
        try:
            yield
        except Exception as error:
            failed = error
        said = self.gather(None if failed is None else str(failed) or repr(failed))
        if failed is not None:
            raise failed
        for rank, words in enumerate(said):
            if words is not None:
                raise DataError(f"rank {rank} cannot fit its rows: {words}")

    def agree_on(self, facts: dict[str, Any] | None) -> None:
        """Raises DataError on every rank if a fact is not the same on all; it names two ranks and what they have.

        A rank that has None agrees with all.
        """
        everyone = self.gather(facts and {name: _plain(value) for name, value in facts.items()})
        known = [(rank, found) for rank, found in enumerate(everyone) if found is not None]
        for rank, theirs in known:
            first, ours = known[0]
            for name, value in ours.items():
                if theirs.get(name) != value:
                    found = f"rank {first} has {name}={value!r} and rank {rank} has {name}={theirs.get(name)!r}"
                    raise DataError(f"{found}: give every rank the same")


def _plain(value: Any) -> Any:
    """What can be compared with `!=`, sent and printed in full: for an array a text, for a kind of dict a dict."""
    if hasattr(value, "__array__") and np.ndim(value):
        array = np.asarray(value, dtype=np.float64)
        return f"an array of shape {array.shape} with checksum {zlib.crc32(array.tobytes())}"
    return dict(value) if isinstance(value, dict) else value


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
