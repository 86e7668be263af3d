"""PyTorch's operator database at a budget of 0: forward, gradients and their gradients have plain's bits.

LMS_OP repeats one operator: `LMS_OP=linalg.solve pytest tests/lms/torch/campaign/test_op_db.py -m "" -s`. The output
names what is left out, and says why.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from lms.torch.session import Session

SEED = 20261126
Result = list[object]


def is_differentiable(one: object) -> bool:
    return isinstance(one, Tensor) and one.requires_grad


def run(function: Callable[..., Any], sample: Any, bits: Callable[[Tensor], object], *, twice: bool) -> Result:
    """Bits of what the function returns for the sample, of the gradients and, if `twice`, of theirs; or the error."""
    given = sample.input, list(sample.args), dict(sample.kwargs)
    leaves = [one for one in tree_flatten(given)[0] if is_differentiable(one)]
    found: Result = []
    torch.manual_seed(SEED)
    try:
        # Copies: LMS leaves leaves alone, and some functions write to what they are given. Nothing else refers to the
        # copies once the function has returned.
        first, args, kwargs = tree_map(lambda one: one.clone() if isinstance(one, Tensor) else one, given)
        result = function(first, *args, **kwargs)
        del first, args, kwargs
        made = [one for one in tree_flatten(result)[0] if isinstance(one, Tensor)]
        del result
        found += [bits(one) for one in made]
        loss = scalar(made)
        del made
        if loss is None:
            return found
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, create_graph=twice)
        del loss
        found += [None if one is None else bits(one) for one in gradients]
        again = scalar(gradients)
        del gradients
        if again is not None:
            seconds = torch.autograd.grad(again, leaves, allow_unused=True)
            found += [None if one is None else bits(one) for one in seconds]
    except Exception as error:
        found.append((type(error).__name__, str(error)[:95]))
    return found


def scalar(tensors: Any) -> Tensor | None:
    """A number whose gradient by each entry of these tensors is another one; None if it has no gradient."""
    total: Tensor | None = None
    for one in tensors:
        if not is_differentiable(one):
            continue
        one = torch.view_as_real(one.resolve_conj()) if one.is_complex() else one
        part = (one * torch.rand(one.shape, dtype=one.dtype)).sum()
        total = part if total is None else total + part
    return total


def samples_of(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    torch.manual_seed(SEED)
    return iter(op.sample_inputs("cpu", dtype, requires_grad=True))


def functions_of(op: Any) -> Iterator[Callable[..., Any]]:
    yield op.op
    if op.inplace_variant is not None:
        yield op.inplace_variant


def is_unsteady(function: Callable[..., Any], sample: Any, bits: Callable[[Tensor], object], *, twice: bool) -> bool:
    """Whether plain runs differ, as some of LAPACK's do if their memory lies elsewhere."""
    elsewhere, seen = [], set()
    for number in range(200):
        seen.add(str(run(function, sample, bits, twice=twice)))
        elsewhere.append(torch.empty(7 * number % 97 + 1))
    return len(seen) > 1


class Tally:
    """What was compared, and the names of what was left out, by reason."""

    def __init__(self) -> None:
        self.operators = self.samples = self.moved = 0
        self.left_out: defaultdict[str, list[str]] = defaultdict(list)

    def told(self) -> str:
        lines = [f"{self.operators} operators, {self.samples} samples and functions, {self.moved} bytes swapped out"]
        lines += [f"left out, {why}: {len(names)}: {', '.join(names)}" for why, names in self.left_out.items()]
        return "\n".join(lines)


def compare(op: Any, dtype: torch.dtype, bits: Callable[[Tensor], object], tally: Tally) -> None:
    """All samples of one operator, plain and in one session."""
    name = op.formatted_name
    if dtype not in op.supported_backward_dtypes("cpu"):
        tally.left_out["no backward for this type"].append(name)
        return
    twice = op.supports_gradgrad and dtype is not torch.float32
    cases, unsteady = [], set()
    for sample in samples_of(op, dtype):
        for function in functions_of(op):
            cases.append((function, sample, run(function, sample, bits, twice=twice)))
            if run(function, sample, bits, twice=twice) != cases[-1][2]:
                unsteady.add(len(cases) - 1)
    with Session(budget=0, min_size=0) as session:
        for number, (function, sample, plain) in enumerate(cases):
            if number in unsteady:
                continue
            for by in ("the rule", "the plan"):
                told = f"LMS_OP={name}: {dtype}, case {number}, {function}, by {by}"
                if run(function, sample, bits, twice=twice) != plain:
                    with session.pause():
                        assert is_unsteady(function, sample, bits, twice=twice), told
                    unsteady.add(number)
            if session._swapper.live:
                gc.collect()
            assert session._swapper.live == 0, f"{told}: records outlived their graph"
        moved = session.stats()["swapped_out"]
    if unsteady:
        tally.left_out["plain runs differ"].append(f"{name} ({len(unsteady)} of {len(cases)} cases)")
    tally.operators += bool(cases)
    tally.samples += len(cases) - len(unsteady)
    tally.moved += moved  # type: ignore[assignment, operator]
    if cases and not moved:
        tally.left_out["nothing that may move is saved"].append(name)


def compare_all(operators: list[Any], dtype: torch.dtype, bits: Callable[[Tensor], object]) -> Tally:
    tally = Tally()
    chosen = os.environ.get("LMS_OP")
    gc.collect()
    gc.freeze()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in operators:
            if chosen is None or op.formatted_name == chosen:
                compare(op, dtype, bits, tally)
    print(f"\n{dtype}: {tally.told()}")
    return tally


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_operators_at_a_budget_of_0_have_plains_bits(
    dtype: torch.dtype, bits: Callable[[Tensor], object], one_thread: None
) -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    tally = compare_all(op_db, dtype, bits)
    assert (tally.operators > 200 and tally.moved > 1 << 20) or "LMS_OP" in os.environ
