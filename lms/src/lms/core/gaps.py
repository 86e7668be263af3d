"""Gaps: stretches of a step in which a tensor could be away, and the bytes that are held if it is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lms.core.profile import Bytes
from lms.core.trace import Trace

_ONE_OPERATION = 1e-4  # seconds; the accesses of one operation follow each other within microseconds


class Gap(NamedTuple):
    """A stretch in which a tensor is not needed: it may be absent from `start` up to, not including, `before`.

    If `before` is past the last access, the stretch goes on in the next step.
    """

    tensor: int
    nbytes: int
    written: int  # the last write before it; negative if that was in the step before
    after: int  # its way out can start with this access
    start: int
    before: int
    seconds: float  # computation in it: what the link has to hide the copies
    comes_back: bool
    between_reads: bool


def find_gaps(trace: Trace) -> list[Gap]:
    """Every stretch in which a tensor could be away."""
    clock = np.cumsum(trace.times)  # at each access, and at the end
    gaps: list[Gap] = []
    end = len(trace.accesses)
    for index, (tensor, touches) in enumerate(zip(trace.tensors, trace.touches, strict=True)):
        if tensor.pinned:
            continue
        after = touches[0]
        written = max((at for at in touches if trace.accesses[at].kind == "write"), default=-end) - end
        # A tensor that lives on is touched in the next step as it is in this one.
        freed = tensor.freed if tensor.freed is not None else touches[0] + end
        for at, following in pairwise([*touches, freed]):
            kind = trace.accesses[at].kind
            if kind != "hold":
                after = at
            if kind == "write":
                written = at
            comes_back = following < freed or tensor.freed is None
            if comes_back and trace.accesses[following % end].kind == "hold":
                continue  # the framework has it in hand until then
            start = max(at + 1, tensor.let_go or 0)
            if start >= following:
                continue
            # The operation that read it has it in hand until the next access; `let_go` tells of the one that wrote it.
            begin = start - (kind != "read")
            seconds = float(clock[min(following, end)] - clock[begin])
            if tensor.freed is None and following >= end:
                seconds += float(clock[following - end])
            if kind == "read" and seconds < _ONE_OPERATION:
                continue  # one operation that unpacks several tensors has all of them in hand
            gaps.append(
                Gap(
                    tensor=index,
                    nbytes=tensor.nbytes,
                    written=written,
                    after=after,
                    start=start,
                    before=following if tensor.freed is None else min(following, end),
                    seconds=seconds,
                    comes_back=comes_back,
                    between_reads=kind == "read" and comes_back,
                )
            )
    return gaps


def parts_of(gap: Gap, end: int) -> tuple[tuple[int, int], ...]:
    """The stretches of one step of `end` accesses that the gap covers."""
    if gap.before <= end:
        return ((gap.start, gap.before),)
    return (gap.start, end), (0, gap.before - end)


def held_at(trace: Trace, chosen: Sequence[Gap]) -> Bytes:
    """Bytes held at each access when the link takes no time and the chosen gaps are used."""
    end = len(trace.accesses)
    change = np.zeros(end + 1, np.int64)
    for gap in chosen:
        for start, stop in parts_of(gap, end):
            change[start] -= gap.nbytes
            change[stop] += gap.nbytes
    return np.array(trace.live, np.int64) + np.cumsum(change)[:-1]


def held_before(trace: Trace, chosen: Sequence[Gap]) -> Bytes:
    """Bytes held in the stretch before each access and in the tail: `held_at`, one access later."""
    end = len(trace.accesses)
    lives_on = sum(tensor.nbytes for tensor in trace.tensors if tensor.freed is None and not tensor.pinned)
    first = lives_on - sum(gap.nbytes for gap in chosen if gap.comes_back and gap.start < end <= gap.before)
    return np.concatenate([np.array([first], np.int64), held_at(trace, chosen)])


def lingering(trace: Trace, chosen: Sequence[Gap]) -> Bytes:
    """Bytes at each access that LMS may have let go of by then while the forward still holds them."""
    change = np.zeros(len(trace.accesses) + 1, np.int64)
    for gap in chosen:
        change[gap.after + 1] += gap.nbytes
        change[gap.start] -= gap.nbytes
    return np.cumsum(change)[:-1]
