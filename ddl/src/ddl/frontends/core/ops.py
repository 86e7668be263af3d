"""The reductions, by Horovod's names."""

from __future__ import annotations

import enum
from typing import Generic, NamedTuple, TypeVar

from ddl.errors import UnsupportedError

SetT_co = TypeVar("SetT_co", covariant=True)


class Op(enum.Enum):
    """A reduction over ranks, element by element."""

    Average = "average"
    Sum = "sum"
    Min = "min"
    Max = "max"
    Product = "product"
    Adasum = "adasum"  # scripts may mention the name; using it is an error


Average, Sum, Min, Max, Product, Adasum = Op


class Reduction(NamedTuple, Generic[SetT_co]):
    """How tensors are reduced over the ranks of a set; the factors multiply them before and after."""

    op: Op
    prescale: float
    postscale: float
    process_set: SetT_co

    def terms(self, more: str = "") -> str:
        """The part that must be the same on every rank, in words, and `more`."""
        factors = [f"{name}_factor {factor}" for name, factor in self.factors if factor != 1]
        return ", ".join([self.op.name, *factors, *([more] if more else [])])

    @property
    def factors(self) -> tuple[tuple[str, float], ...]:
        """The names and values of both factors."""
        return ("prescale", self.prescale), ("postscale", self.postscale)


def chosen(average: bool | None, op: Op | None) -> Op:
    """The reduction given by the old argument `average` or its successor `op`; Average if both are None.

    Raises ValueError if both are given.
    """
    if average is not None and op is not None:
        raise ValueError(f"average={average} and op={op.name} were both given: leave out average, which op replaced")
    if op is not None:
        return op
    return Op.Sum if average is False else Op.Average


def need_linear(op: Op) -> None:
    """Raises RuntimeError if no gradient flows through the reduction."""
    if op not in (Op.Average, Op.Sum):
        raise RuntimeError(f"no gradient flows through a reduction by {op.name}: only through Average and Sum")


def check_optimizer(op: Op, predivide: float, groups: object) -> None:
    """Raises ValueError for arguments of an optimizer or a tape that do not fit together, and what `check` raises."""
    check(op)
    if predivide != 1 and op is not Op.Average:
        raise ValueError(f"gradient_predivide_factor is for op=Average, but op is {op.name}: leave it at 1")
    if not predivide > 0:
        raise ValueError(f"gradient_predivide_factor is {predivide}, but must be more than 0")
    if isinstance(groups, int) and groups < 0:
        raise ValueError(f"groups is {groups}, but must be 0 or more, or a list of lists")


def checked_passes(passes: int) -> int:
    """`passes`. Raises ValueError if it is less than 1."""
    if passes < 1:
        raise ValueError(f"backward_passes_per_step is {passes}, but must be 1 or more")
    return passes


def check(op: object) -> None:
    """Raises UnsupportedError for Adasum, and ValueError for anything that is not an Op."""
    if op is Op.Adasum:
        raise UnsupportedError("op=Adasum: DDL has no Adasum; use op=Average with a learning rate scaled by size()")
    if not isinstance(op, Op):
        allowed = ", ".join(known.name for known in Op if known is not Op.Adasum)
        raise ValueError(f"op is {op!r}: allowed are {allowed} of this module")
