"""The reductions, by Horovod's names."""

from __future__ import annotations

import enum
from typing import Generic, NamedTuple, TypeVar

from ddl.errors import UnsupportedError

SetT = TypeVar("SetT")


class Op(enum.Enum):
    """A reduction over ranks, element by element."""

    Average = "average"
    Sum = "sum"
    Min = "min"
    Max = "max"
    Product = "product"
    Adasum = "adasum"  # a name that scripts mention; using it is an error


Average, Sum, Min, Max, Product, Adasum = Op


class Reduction(NamedTuple, Generic[SetT]):
    """How tensors are reduced over the ranks of a set. They are multiplied by the factors before and after."""

    op: Op
    prescale: float
    postscale: float
    process_set: SetT

    def terms(self, more: str = "") -> str:
        """What of it must be the same on every rank, and `more`."""
        factors = [f"{name}_factor {factor}" for name, factor in self.factors if factor != 1]
        return ", ".join([self.op.name, *factors, *([more] if more else [])])

    @property
    def factors(self) -> tuple[tuple[str, float], ...]:
        """The names and values of both."""
        return ("prescale", self.prescale), ("postscale", self.postscale)


def chosen(average: bool | None, op: Op | None) -> Op:
    """What the old argument `average` and its successor `op` say together; the average if both are None.

    Raises ValueError if both are given.
    """
    if average is not None and op is not None:
        raise ValueError(f"average={average} and op={op.name} were both given: leave out average, which op replaced")
    if op is not None:
        return op
    return Op.Sum if average is False else Op.Average


def check(op: object) -> None:
    """Raises UnsupportedError for Adasum, ValueError for what is no Op."""
    if op is Op.Adasum:
        raise UnsupportedError("op=Adasum: DDL has no Adasum; use op=Average with a learning rate scaled by size()")
    if not isinstance(op, Op):
        allowed = ", ".join(known.name for known in Op if known is not Op.Adasum)
        raise ValueError(f"op is {op!r}: allowed are {allowed} of this module")
