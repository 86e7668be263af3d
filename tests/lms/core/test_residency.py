"""Which blocks are on the device: each one as it is used, within the room, and with few moves."""

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import pytest

from lms.core.residency import Move, Residency


@dataclass(eq=False)
class Memory:
    nbytes: int
    transient: bool = False


class Device:
    """What is on a device that makes the moves it is told to; it takes none that makes no sense."""

    def __init__(self, blocks: Sequence[Memory], room: int) -> None:
        self.residency: Residency[Memory] = Residency()
        self.here: set[Memory] = set()
        self.moved = 0
        self.apply(self.residency.keep(room))
        for block in blocks:
            self.make(block)
        self.moved = 0

    def apply(self, moves: Sequence[Move[Memory]]) -> None:
        for block, back in moves:
            assert (block in self.here) != back
            (self.here.add if back else self.here.remove)(block)
            self.moved += back
        assert sum(block.nbytes for block in self.here) == self.residency.held

    def make(self, block: Memory) -> None:
        moves = self.residency.make(block)
        self.here.add(block)
        self.apply(moves)

    def drop(self, block: Memory) -> None:
        self.residency.drop(block)
        self.here.discard(block)

    def step(self, course: Sequence[Sequence[Memory]], *, known: bool = True, start: int = 0) -> None:
        room = self.residency.room
        for position, blocks in enumerate(course[start:], start):
            self.apply(self.residency.use(blocks, position if known else None))
            assert self.here.issuperset(blocks)
            following = course[(position + 1) % len(course)] if known else ()
            least = sum(block.nbytes for block in {*blocks, *following})
            assert self.residency.held <= max(room, least)


def least_moves(course: Sequence[Memory], steps: int, slots: int) -> int:
    """Blocks that come back in the last of the steps if they are all of one size: Belady's minimum."""
    uses = list(chain.from_iterable([course] * steps))
    here: set[Memory] = set()
    moved = 0
    for at, block in enumerate(uses):
        if block in here:
            continue
        moved += at >= len(uses) - len(course)
        if len(here) == slots:
            here.remove(max(here, key=lambda one: uses.index(one, at) if one in uses[at:] else len(uses)))
        here.add(block)
    return moved


def lru_moves(course: Sequence[Memory], slots: int) -> int:
    here: OrderedDict[Memory, None] = OrderedDict()
    moved = 0
    for block in chain(course, course):
        if block in here:
            here.move_to_end(block)
            continue
        moved += 1
        here[block] = None
        if len(here) > slots:
            here.popitem(last=False)
    return moved - len(set(course))


@pytest.mark.parametrize("seed", range(200))
def test_what_is_used_is_on_the_device_and_the_room_is_kept(seed: int) -> None:
    rng = random.Random(seed)
    blocks = [Memory(rng.randint(1, 100), rng.random() < 0.2) for _ in range(rng.randint(2, 30))]
    course = [rng.sample(blocks, rng.randint(1, min(3, len(blocks)))) for _ in range(rng.randint(1, 60))]
    device = Device(blocks, rng.randint(0, sum(block.nbytes for block in blocks)))
    device.step(course, known=False)
    device.residency.expect(course)
    for _ in range(3):
        device.step(course, start=rng.choice([0, 0, rng.randrange(len(course))]))  # or an evaluation, which jumps
        gone = rng.choice(blocks)
        device.drop(gone)
        device.make(gone)
        device.apply(device.residency.keep(rng.randint(0, 1000)))
    room = sum(block.nbytes for block in blocks)
    device.apply(device.residency.keep(room))
    device.step(course)
    before = device.moved
    device.step(course)
    assert device.moved == before, "all that is used fits"


@pytest.mark.parametrize("slots", [6, 12, 18, 22])
def test_a_model_comes_back_about_as_seldom_as_can_be(slots: int) -> None:
    blocks = [Memory(1) for _ in range(24)]
    course = [*blocks, *reversed(blocks), *blocks]  # forward, backward, optimizer
    device = Device(blocks, slots)
    device.residency.expect([(block,) for block in course])
    for _ in range(3):
        device.moved = 0
        device.step([(block,) for block in course])
    assert least_moves(course, 3, slots) <= device.moved <= least_moves(course, 3, slots - slots // 4 - 1)
    assert device.moved < lru_moves(course, slots)


def test_what_will_be_freed_leaves_first_after_its_last_use() -> None:
    weights = [Memory(1) for _ in range(4)]
    gradient = Memory(1, transient=True)
    device = Device(weights[:3], 4)
    course = [(weights[0],), (gradient,), (weights[1],), (weights[2],), (weights[3],), (weights[0],)]
    device.residency.expect(course)
    device.make(gradient)
    for position in range(3):
        device.apply(device.residency.use(course[position], position))
    device.make(weights[3])
    assert gradient not in device.here


def test_what_was_freed_does_not_come_back() -> None:
    one, other = Memory(1), Memory(1)
    device = Device([one, other], 1)
    course = [(one,), (other,)] * 2
    device.residency.expect(course)
    device.drop(one)
    device.step([()] * 4)
    assert one not in device.here
    assert one not in device.residency


def test_entries_of_the_past_do_not_pile_up() -> None:
    blocks = [Memory(1) for _ in range(8)]
    device = Device(blocks, 100)
    course = [(block,) for block in blocks]
    device.residency.expect(course)
    for _ in range(1000):
        device.step(course)
    assert len(device.residency._queue) < 200
