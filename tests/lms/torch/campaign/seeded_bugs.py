"""Bugs that can be put into LMS, one at a time, and random graphs that show them: `seeded_bugs.py NAME`.

It ends with 1 and says how a graph differs from plain, or with 0 if none does. Some of these bugs write to memory that
is free, so a test runs each in a process of its own.
"""

from __future__ import annotations

import gc
import os
import sys

import pytest
import torch

from graph_runs import check
from lms.memory.file import FileSlab, Place
from lms.memory.slab import ALIGNMENT
from lms.memory.slots import Ledger
from lms.memory.transfer import FileEngine, FileSlot, Memory, ThreadCopy
from lms.runtime import plan_maker
from lms.torch.cpu import engine
from lms.torch.live_records import LiveRecords
from lms.torch.mover import Mover
from lms.torch.records import LiveRecord, View
from lms.torch.session import disable
from lms.torch.storages import Storages
from random_graphs import quietly
from random_trainings import digest
from slow_disk import slow_disk

SEEDS = range(7000, 7100)  # most that may be needed

Patch = pytest.MonkeyPatch


def missing_wait(patch: Patch) -> None:
    """The backward does not wait for a copy back."""
    wait = Mover.wait

    def impatient(self: Mover, record: LiveRecord, lane: str) -> None:
        if lane == "out":
            wait(self, record, "out")

    patch.setattr(Mover, "wait", impatient)


def missing_wait_for_a_dead_records_copy(patch: Patch) -> None:
    """A record's memory is free although a copy back still writes into it."""
    read = FileEngine.read

    def unkept(self: FileEngine, slot: FileSlot, memory: Memory, *, keep: object = None) -> ThreadCopy:
        copy = read(self, slot, memory)
        copy._over = True  # who asks is told that it is complete
        return copy

    patch.setattr(FileEngine, "read", unkept)


def early_release_of_memory(patch: Patch) -> None:
    """A record's memory is free as soon as its copy out has started."""
    offload = Mover.offload

    def hasty(self: Mover, record: LiveRecord) -> object:
        copy = offload(self, record)
        if copy is not None:
            copy.keep = None  # type: ignore[misc]
            for view in record.views:
                view.vacate()
        return copy

    patch.setattr(Mover, "offload", hasty)


def early_release_of_the_place_in_the_file(patch: Patch) -> None:
    """The place of a record's bytes is another's as soon as they were read once."""
    patch.setattr(Ledger, "use", lambda self, slot: None)


def early_release_of_the_place_after_the_write(patch: Patch) -> None:
    """The place of a record's bytes is another's as soon as they are written."""
    write = FileEngine.write

    def forgotten(self: FileEngine, *args: object, **kwargs: object) -> tuple[FileSlot, ThreadCopy]:
        slot, copy = write(self, *args, **kwargs)  # type: ignore[arg-type]
        slot.users -= 1
        return slot, copy

    patch.setattr(FileEngine, "write", forgotten)


def wrong_offset_of_a_view(patch: Patch) -> None:
    """A view comes back at the beginning of its storage."""
    vacate = View.vacate

    def at_zero(self: View) -> None:
        vacate(self)
        assert self.geometry is not None
        dtype, _, size, stride = self.geometry
        self.geometry = dtype, 0, size, stride

    patch.setattr(View, "vacate", at_zero)


def wrong_offset_in_the_file(patch: Patch) -> None:
    """Bytes are read one block before those that were written."""
    read = FileSlab.read

    def shifted(self: FileSlab, place: Place, address: int) -> None:
        other = Place(max(place.offset - ALIGNMENT, 0), place.nbytes, place.skew)
        read(self, other, address)

    patch.setattr(FileSlab, "read", shifted)


def wrong_offset_in_a_page(patch: Patch) -> None:
    """Bytes come back as if they had begun a page."""
    within = engine.within
    patch.setattr(engine, "within", lambda memory, _skew, nbytes: within(memory, 0, nbytes))


def stale_version_is_used(patch: Patch) -> None:
    """Nobody looks whether a saved tensor was changed in place."""
    patch.setattr(View, "check", lambda self: None)


def stale_version_is_found(patch: Patch) -> None:
    """A storage has one record, whatever version of it is saved."""

    class ByStorage(dict):  # type: ignore[type-arg]
        def get(self, key: tuple[int, ...], default: object = None) -> object:
            return next((record for known, record in self.items() if known[0] == key[0]), default)

    plain = Storages.__init__

    def by_storage(self: Storages) -> None:
        plain(self)
        self.by_key = ByStorage()

    patch.setattr(Storages, "__init__", by_storage)


def stale_piece_is_found(patch: Patch) -> None:
    """Pieces of one storage that have the same version are taken for unchanged."""
    patch.setattr(LiveRecords, "rewritten", lambda self, record, view: False)


def stale_address_is_found(patch: Patch) -> None:
    """A record is found by the address of its storage, although that storage is dead and another has its address."""
    patch.setattr(Storages, "lose", lambda self, record: None)
    patch.setattr(LiveRecord, "holds", lambda self, storage, root: True)


def page_dropped_dirty(patch: Patch) -> None:
    """A record is dropped although its bytes were not written, if others once lay in its place in the file."""
    write = FileSlab.write

    def forgetful(self: FileSlab, place: Place, address: int) -> None:
        if os.fstat(self.fileno()).st_size < place.offset + place.span:
            write(self, place, address)

    patch.setattr(FileSlab, "write", forgetful)


BUGS = [
    missing_wait,
    missing_wait_for_a_dead_records_copy,
    early_release_of_memory,
    early_release_of_the_place_in_the_file,
    early_release_of_the_place_after_the_write,
    wrong_offset_of_a_view,
    wrong_offset_in_the_file,
    wrong_offset_in_a_page,
    stale_version_is_used,
    stale_version_is_found,
    stale_piece_is_found,
    stale_address_is_found,
    page_dropped_dirty,
]


def main(name: str) -> int:
    """The program."""
    plan_maker.CALIBRATION = 1 << 16
    torch.set_num_threads(1)
    gc.freeze()
    (bug,) = (bug for bug in BUGS if bug.__name__ == name)
    bug(pytest.MonkeyPatch())
    with quietly():
        for number, seed in enumerate(SEEDS, 1):
            try:
                check(seed, digest, delays=slow_disk(seed))
            except Exception as error:
                print(f"graph {number}: {type(error).__name__}: {str(error)[:200]}")
                return 1
            finally:
                disable()
    print(f"{len(SEEDS)} graphs are identical")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
