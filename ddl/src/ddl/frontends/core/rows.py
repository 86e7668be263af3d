"""Rows of tensors, and how ranks divide them. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def rows_of(shape: Sequence[int], what: str) -> int:
    """The number of rows of a tensor. Raises ValueError, which names the call `what`, if it has no dimensions."""
    if not shape:
        raise ValueError(f"{what} of a tensor without dimensions: it has no rows; pass tensor.reshape(1)")
    return shape[0]


def shares(rows: int, size: int) -> list[int]:
    """The number of rows that each of `size` ranks keeps: equal, except that the first ranks may have one more."""
    each, more = divmod(rows, size)
    return [each + (rank < more) for rank in range(size)]


def splits_of(splits: Sequence[int] | None, rows: int, size: int) -> list[int]:
    """The number of rows that an alltoall sends to each rank: equal if `splits` is None. Raises ValueError."""
    if splits is None:
        if rows % size != 0:
            raise ValueError(f"alltoall: {rows} rows cannot be divided equally among {size} ranks: give splits")
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"alltoall: splits is {list(splits)}: it must have {size} sizes, one for each rank, whose sum is {rows}, "
            "the rows of the tensor"
        )
    return list(splits)
