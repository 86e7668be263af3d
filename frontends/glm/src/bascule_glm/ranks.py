"""Sums over the ranks of a job. Each rank has a share of the rows. One process alone adds nothing."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
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
        """The sorted distinct numbers that any rank has. Each has some. Raises DataError for what is no number."""
        with self.agree():
            if values.dtype.kind not in "biuf":
                raise DataError(f"labels are {values.dtype}: between ranks they must be numbers, so encode them alike")
            found = np.unique(values.astype(np.float64))
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

    def agree_on(self, facts: dict[str, Any], known: bool = True) -> None:
        """Raises DataError on every rank if a fact is not the same on all; it names two ranks and what they have.

        A rank that does not know the facts agrees with all, and gives as many.
        """
        sums = [zlib.crc32(repr(_plain(value)).encode(errors="backslashreplace")) for value in facts.values()]
        keys = self.gather(np.array([known, *sums]))
        asked = np.flatnonzero(keys[:, 0])
        differ = np.argwhere(keys[asked] != keys[asked[:1]])
        if len(differ):
            first, other, fact = int(asked[0]), int(asked[differ[0, 0]]), int(differ[0, 1]) - 1
            name, value = list(facts.items())[fact]
            said = self._texts(f"{name}={_plain(value) if isinstance(value, np.ndarray) else repr(value)}")
            found = f"rank {first} has {said[first]} and rank {other} has {said[other]}"
            raise DataError(f"{found}: give every rank the same")

    def _texts(self, words: str) -> list[str]:
        """Everyone's words, up to a length."""
        own = words.encode(errors="backslashreplace")[:_WORDS].ljust(_WORDS, b"\0")
        everyone = self.gather(np.frombuffer(own, dtype=np.uint8))
        return [bytes(one).rstrip(b"\0").decode(errors="ignore") for one in everyone]


def _plain(value: Any) -> Any:
    """The same for values that mean the same: 1 and 1.0, dicts in another order."""
    if isinstance(value, (Real, np.bool_)):
        return float(value)
    if isinstance(value, dict):
        return sorted(((_plain(key), _plain(one)) for key, one in value.items()), key=repr)
    if isinstance(value, np.ndarray):  # whose repr leaves out most of a long one
        numbers = np.asarray(value, dtype=np.float64)
        return f"an array of shape {numbers.shape} with checksum {zlib.crc32(numbers.tobytes())}"
    return value


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
