"""The offset allocator behind both slabs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from lms.memory.slab import ALIGNMENT, Slab, round_up

SIZE = 64 * ALIGNMENT


def test_the_first_hole_that_is_long_enough_is_taken() -> None:
    slab = Slab(SIZE)
    first, second, third = (slab.allocate(2 * ALIGNMENT) for _ in range(3))
    assert (first, second, third) == (0, 2 * ALIGNMENT, 4 * ALIGNMENT)
    slab.free(0)
    assert slab.allocate(3 * ALIGNMENT) == 6 * ALIGNMENT  # too long for the hole at 0
    assert slab.allocate(1) == 0


def test_every_extent_has_at_least_one_block_so_that_no_two_share_an_offset() -> None:
    slab = Slab(SIZE)
    assert slab.allocate(0) == 0
    assert slab.allocate(0) == ALIGNMENT
    assert slab.used == 2 * ALIGNMENT


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_holes_that_touch_become_one(order: tuple[int, ...]) -> None:
    slab = Slab(3 * ALIGNMENT)
    offsets = [slab.allocate(1) for _ in range(3)]
    assert slab.allocate(1) is None
    for index in order:
        offset = offsets[index]
        assert offset is not None
        slab.free(offset)
    assert slab.allocate(3 * ALIGNMENT) == 0


def test_what_was_not_allocated_cannot_be_freed() -> None:
    slab = Slab(SIZE)
    slab.allocate(2 * ALIGNMENT)
    with pytest.raises(KeyError):
        slab.free(ALIGNMENT)
    slab.free(0)
    with pytest.raises(KeyError):
        slab.free(0)


def test_the_peak_stays_when_extents_go() -> None:
    slab = Slab(SIZE)
    slab.allocate(5 * ALIGNMENT)
    slab.free(0)
    assert (slab.used, slab.peak) == (0, 5 * ALIGNMENT)


def test_a_slab_smaller_than_a_block_has_room_for_nothing() -> None:
    assert Slab(ALIGNMENT - 1).allocate(1) is None


@given(st.integers(0, 1 << 50))
def test_rounding_up_gives_the_least_multiple_that_is_enough(nbytes: int) -> None:
    rounded = round_up(nbytes)
    assert rounded % ALIGNMENT == 0
    assert nbytes <= rounded < nbytes + ALIGNMENT


class SlabMachine(RuleBasedStateMachine):
    """Any order of calls, against a map of every block of the slab."""

    extents: Bundle[int] = Bundle("extents")

    def __init__(self) -> None:
        super().__init__()
        self.slab = Slab(SIZE)
        self.blocks: list[int | None] = [None] * (SIZE // ALIGNMENT)  # the offset of the extent that has the block

    @rule(target=extents, nbytes=st.integers(0, 20 * ALIGNMENT))
    def allocate(self, nbytes: int) -> object:
        offset = self.slab.allocate(nbytes)
        need = max(1, -(-nbytes // ALIGNMENT))
        runs = [
            at
            for at in range(len(self.blocks) - need + 1)
            if all(block is None for block in self.blocks[at : at + need])
        ]
        if not runs:
            assert offset is None
            return multiple()
        assert offset == runs[0] * ALIGNMENT, "not the first fit"
        for at in range(runs[0], runs[0] + need):
            self.blocks[at] = offset
        return offset

    @rule(offset=consumes(extents))
    def free(self, offset: int) -> None:
        self.slab.free(offset)
        self.blocks = [None if block == offset else block for block in self.blocks]

    @invariant()
    def the_count_is_right(self) -> None:
        assert self.slab.used == sum(block is not None for block in self.blocks) * ALIGNMENT
        assert self.slab.peak >= self.slab.used


TestAnyOrderOfCalls = SlabMachine.TestCase
TestAnyOrderOfCalls.settings = settings(max_examples=40, stateful_step_count=40)
