"""Sums over the ranks of a job. Each rank has a share of the rows. One process alone adds nothing."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bascule_glm.errors import DataError, GLMError

_WORDS = 1000  # bytes of a text that the other ranks repeat


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

    def gather(self, array: NDArray[Any]) -> NDArray[Any]:
        """Everyone's `array` of one shape, stacked: (size, ...)."""
        if self.size == 1:
            return np.expand_dims(array, 0)
        import ddl

        return np.asarray(ddl.allgather(np.ascontiguousarray(array)))

    def union(self, values: NDArray[Any]) -> NDArray[Any]:
        """The sorted distinct numbers that any rank has. Each has some."""
        found = np.unique(np.asarray(values, dtype=np.float64))
        longest = int(self.gather(np.array([len(found)])).max())
        return np.unique(self.gather(np.resize(found, longest)))

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
        said = self._texts("" if failed is None else str(failed) or repr(failed))
        if failed is not None:
            raise failed
        for rank, words in enumerate(said):
            if words:
                raise DataError(f"rank {rank} cannot fit its rows: {words}")

    def agree_on(self, facts: dict[str, Any]) -> None:
        """Raises DataError on every rank if a fact is not the same on all; it names two ranks and what they have."""
        texts = [f"{name}={value!r}" for name, value in facts.items()]
        keys = self.gather(np.array([zlib.crc32(text.encode()) for text in texts]))
        if (keys != keys[0]).any():
            other, fact = np.argwhere(keys != keys[0])[0].tolist()
            said = self._texts(texts[fact])
            raise DataError(f"rank 0 has {said[0]} and rank {other} has {said[other]}: give every rank the same")

    def _texts(self, words: str) -> list[str]:
        """Everyone's words, up to a length."""
        everyone = self.gather(np.frombuffer(words.encode()[:_WORDS].ljust(_WORDS, b"\0"), dtype=np.uint8))
        return [bytes(one).rstrip(b"\0").decode(errors="ignore") for one in everyone]


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
