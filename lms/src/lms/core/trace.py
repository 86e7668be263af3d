"""A trace: the tensors that one step wrote, read and freed, with bytes and times. Plain data, stored as JSON.

A step touches *tensors*: the activations that autograd saves, and the state that lives from step to step (parameters,
gradients, the optimizer's). An *access* is one touch; accesses are numbered from 0 in the order in which they happened,
and every position in a step is such a number. A step is a cycle: after its last access comes the next step's first.
A tensor that lives on is on the device at both ends of that seam, or away at both.

An activation is one (storage, version) that autograd saved, whatever number of views of it were saved. Its step is a
*pass*: from the first saved tensor until none is left.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from reprlib import repr as shortened
from typing import Annotated, Literal, Self

from lms import documents
from lms.core.link import Link

FORMAT = "lms-trace-2"
FIRST_FORMAT = "lms-trace-1"  # of passes alone: records that are saved and used

Kind = Literal["activation", "parameter", "gradient", "optimizer"]
AccessKind = Literal["write", "hold", "read"]
MOST_PASSES = 1e6  # in a cycle


@dataclass(frozen=True, slots=True)
class Tensor:
    """The bytes of one tensor of a step. Positions are access numbers."""

    nbytes: int
    freed: int | None  # the first access after its end; len(accesses): the step's end; None: it lives on in the next
    kind: Kind = "activation"
    let_go: int | None = None  # the first access after every other owner let go of it; None: unknown
    pinned: bool = False  # another owner kept it alive past the pass (a batch, a buffer): swapping frees nothing
    module: str = ""  # the module that was running when it was first written
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Access:
    """One touch of a tensor, and the computation that led to it.

    A write changes the bytes, so that a copy elsewhere is stale from then on. A read needs them. A hold is of a tensor
    that the framework has had in hand since its last access, so it cannot have been away: autograd saves another view.
    """

    kind: AccessKind
    tensor: int  # index into Trace.tensors
    seconds: float  # computation since the access before, LMS's own work and waiting left out
    other: int = 0  # most device bytes that LMS did not hold since the access before; 0: not measured


@dataclass(frozen=True)
class Trace:
    """One recorded step. `device` is "cpu" or the GPU's name; `tail` the computation after the last access."""

    tensors: tuple[Tensor, ...]
    accesses: tuple[Access, ...]
    device: str = "cpu"
    capacity: int = 0  # bytes that the device has
    tail: float = 0.0  # seconds from the last access to the step's end
    tail_other: int = 0  # as Access.other, for the tail
    cycle: float = 0.0  # seconds from one optimizer step to the next, all that LMS added left out; 0: not measured
    busy: float = 0.0  # the seconds of the cycle in which the device computed
    between: int = 0  # most device bytes between two passes, as in the optimizer's step; 0: not measured
    # Passes in a cycle, each counted by its saved bytes over this one's.
    passes: Annotated[float, (0.0, MOST_PASSES)] = 1.0
    link: Mapping[str, object] = field(default_factory=dict)  # the link that was measured with it (lms.link.Link)
    machine: Mapping[str, str] = field(default_factory=dict)  # host, versions

    @property
    def records(self) -> tuple[Tensor, ...]:
        """The tensors, under the name that they had before state was traced."""
        return self.tensors

    @cached_property
    def measured(self) -> bool:
        """Whether it is known what the device held beside the saved bytes."""
        return bool(self.accesses) and all(access.other for access in self.accesses)

    @cached_property
    def times(self) -> tuple[float, ...]:
        """Seconds of computation before each access and in the tail."""
        return (*(access.seconds for access in self.accesses), self.tail)

    @cached_property
    def others(self) -> tuple[int, ...]:
        """Most bytes that LMS did not hold before each access and in the tail; 0: not measured."""
        return (*(access.other for access in self.accesses), self.tail_other)

    def with_measured(self, times: Sequence[float], others: Sequence[int]) -> Self:
        """The same accesses with other `times` and `others`."""
        measured = zip(self.accesses, times[:-1], others[:-1], strict=True)
        accesses = tuple(replace(access, seconds=seconds, other=other) for access, seconds, other in measured)
        return replace(self, accesses=accesses, tail=times[-1], tail_other=others[-1])

    @cached_property
    def touches(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor the positions of its accesses, ascending."""
        found: list[list[int]] = [[] for _ in self.tensors]
        for at, access in enumerate(self.accesses):
            found[access.tensor].append(at)
        return tuple(map(tuple, found))

    @cached_property
    def saved(self) -> int:
        """Bytes that may move: all tensors but the pinned."""
        return sum(tensor.nbytes for tensor in self.tensors if not tensor.pinned)

    @cached_property
    def movable(self) -> int:
        """How many tensors may move: all but the pinned."""
        return sum(not tensor.pinned for tensor in self.tensors)

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest tensor that may move: the tolerance of every promise about memory."""
        return max((tensor.nbytes for tensor in self.tensors if not tensor.pinned), default=0)

    @cached_property
    def seconds(self) -> float:
        """Computation of the whole step: its time without any waiting."""
        return sum(access.seconds for access in self.accesses) + self.tail

    def slowdown(self, seconds: float) -> float:
        """How many times as long as its computation alone the step takes if it takes `seconds`."""
        return seconds / self.seconds if self.seconds else 1.0

    def step_seconds(self, seconds: float) -> float:
        """Seconds from one optimizer step to the next if each pass takes `seconds`.

        The rest of the cycle (waiting for data, the optimizer's step) stays as it is. If the cycle was
        not measured: `seconds`.
        """
        if not self.cycle:
            return seconds
        return max(0.0, self.cycle - self.passes * self.seconds) + self.passes * seconds

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Bytes of live tensors at each access when none is moved; pinned ones, which are never moved, left out."""
        change = [0] * (len(self.accesses) + 1)
        for tensor, touches in zip(self.tensors, self.touches, strict=True):
            if tensor.pinned:
                continue
            change[touches[0] if tensor.freed is not None else 0] += tensor.nbytes
            change[tensor.freed if tensor.freed is not None else -1] -= tensor.nbytes
        total, live = 0, []
        for step in change[:-1]:
            total += step
            live.append(total)
        return tuple(live)

    def positions(self, index: int, kind: AccessKind) -> tuple[int, ...]:
        """Where tensor `index` is written, held or read."""
        return tuple(at for at in self.touches[index] if self.accesses[at].kind == kind)

    def check(self) -> None:
        """Raise ValueError if accesses and tensors are not those of one step, or are more bytes than any device has."""
        end = len(self.accesses)
        for at, access in enumerate(self.accesses):
            documents.whole(access.tensor, f"accesses[{at}].tensor", len(self.tensors) - 1)
        for index, tensor in enumerate(self.tensors):
            for name in ("freed", "let_go"):
                documents.whole(getattr(tensor, name) or 0, f"tensors[{index}].{name}", end)
        for index, (tensor, touches) in enumerate(zip(self.tensors, self.touches, strict=True)):
            where = f"tensors[{index}]"
            if not touches:
                raise ValueError(f"{where}: expected one or more accesses, found none")
            if tensor.freed is None:
                if tensor.kind == "activation":
                    raise ValueError(f"{where}.freed: an activation does not live on in the next step")
                continue
            if tensor.freed <= touches[-1]:
                raise ValueError(f"{where}.freed: {tensor.freed} is not after its last access")
            if self.accesses[touches[0]].kind != "write":
                raise ValueError(f"{where}: its first access is no write, and nothing before the step has made it")
        if (total := sum(tensor.nbytes for tensor in self.tensors)) > documents.MOST_BYTES:
            raise ValueError(f"tensors: {total} bytes together, more than {documents.MOST_BYTES}")

    def to_json(self) -> str:
        """The trace as one JSON document, with its format named first."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The trace that `to_json` wrote. Raises ValueError that says what is wrong, and what to do."""
        try:
            document = documents.parse(text)
        except ValueError:
            raise ValueError("not a JSON file; expected what `lms run --trace` wrote") from None
        if not isinstance(document, dict) or document.get("format") not in (FORMAT, FIRST_FORMAT):
            raise ValueError(f"expected the format {FORMAT!r}; record it again with this version")
        try:
            if document["format"] == FIRST_FORMAT:
                document = _of_first_format(document)
            trace = documents.read(cls, {name: one for name, one in document.items() if name != "format"})
            if trace.link:
                Link.from_dict(trace.link)
            trace.check()
        except ValueError as error:
            raise ValueError(f"damaged ({error}); record it again") from None
        return trace


def _of_first_format(document: dict[str, object]) -> dict[str, object]:
    """A document of the first format, with records that are saved and used, in this format."""
    accesses: list[dict[str, object]] = []
    seen: dict[tuple[object, object], list[int]] = {}  # positions of a record's saves and uses
    for at, value in enumerate(documents.items(document.get("accesses"), "accesses")):
        access = documents.mapping(value, f"accesses[{at}]")
        kind, record = access.pop("kind", None), access.pop("record", None)
        if kind not in ("save", "use"):
            raise ValueError(f"accesses[{at}].kind: expected 'save' or 'use', found {shortened(kind)}")
        touches = seen.setdefault((kind, documents.nbytes(record, f"accesses[{at}].record")), [])
        new_kind = "read" if kind == "use" else "hold" if touches else "write"
        accesses.append({**access, "tensor": record, "kind": new_kind})
        touches.append(at)
    tensors = []
    for index, value in enumerate(documents.items(document.get("records"), "records")):
        record = dict(documents.mapping(value, f"records[{index}]"))
        for kind in ("save", "use"):
            found = documents.items(record.pop(f"{kind}s", None), f"records[{index}].{kind}s")
            if found != seen.get((kind, index), []):
                raise ValueError(f"records[{index}].{kind}s: not the positions of its {kind}s in the accesses")
        documents.whole(record.get("freed"), f"records[{index}].freed", len(accesses))  # null has a meaning now
        tensors.append(record)
    rest = {key: value for key, value in document.items() if key not in ("records", "accesses")}
    return {**rest, "tensors": tensors, "accesses": accesses}
