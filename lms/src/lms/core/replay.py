"""Following a recorded step through a stepper, access by access."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from lms.core.items import Item, State
from lms.core.schedule import Course
from lms.core.stepper import Stepper
from lms.core.trace import Trace


def replay(
    trace: Trace,
    course: Course,
    stepper: Stepper[Item],
    reach: Callable[[int], None],
    before: Sequence[Item] = (),
) -> list[Item]:
    """Run one step by `course`, and return its items. Tensors that live on keep the items of the step `before`.

    `reach` is called with the number of each access before the stepper hears of it.
    """
    stepper.begin(course)
    items = [
        before[index] if before and tensor.freed is None else Item(index, tensor.nbytes)
        for index, tensor in enumerate(trace.tensors)
    ]
    stepper.items = dict(enumerate(items))
    freed: dict[int, list[Item]] = defaultdict(list)
    for item, tensor in zip(items, trace.tensors, strict=True):
        item.pinned = tensor.pinned
        if tensor.freed is not None:
            freed[tensor.freed].append(item)
            continue
        if not before and item.index in course.begins_away:
            item.state, item.stored = State.AWAY, True
        stepper.add(item)
    for position, access in enumerate(trace.accesses):
        reach(position)
        for item in freed.get(position, ()):
            if not item.pinned:
                stepper.holdings.free(item)
        stepper.holdings.settle()
        stepper.drop_due()
        item = items[access.tensor]
        if position == trace.touches[item.index][0] and trace.tensors[item.index].freed is not None:
            stepper.add(item)
        elif access.kind != "hold" and not item.pinned:
            stepper.require(item)
            if access.kind == "write":
                stepper.holdings.write(item)
        stepper.access(item, read=access.kind == "read")
    return items


def end_step(trace: Trace, stepper: Stepper[Item], items: Sequence[Item]) -> None:
    """Before the next step: free the tensors that end with this one, and drop those that its last access asked for."""
    for item, tensor in zip(items, trace.tensors, strict=True):
        if tensor.freed == len(trace.accesses) and not item.pinned:
            stepper.holdings.free(item)
    stepper.holdings.settle()
    stepper.drop_due()
