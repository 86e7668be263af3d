"""Carries records between the device and the tier below, and counts what was moved. Decides nothing."""

from __future__ import annotations

import time
from typing import Literal

import torch

from lms.core.items import DeviceFull
from lms.memory.transfer import Copy
from lms.runtime.recorder import Counters
from lms.torch.engine import Engine
from lms.torch.records import LiveRecord
from lms.torch.storages import Storages

Lane = Literal["out", "back"]
Log = list[tuple[Lane, int, Copy]]  # direction, record, copy


class Mover:
    """The stepper's mover for PyTorch's tensors. Called under the swapper's lock."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine = engine
        self.device = device
        self.counters = Counters()
        self.log: Log = []  # copies of the pass under way
        self.storages = Storages()

    # For the stepper

    def offload(self, record: LiveRecord) -> Copy | None:
        """Start the copy out. A record that was modified in place stays: using it raises an error anyway.

        So does one without a view: an interrupt came between the record and its first view.
        """
        if not record.views or any(view.changed for view in record.views):
            return None
        record.slot, copy = self.engine.offload(record.source())
        self.counters.out += record.nbytes
        self._note("out", record, copy)
        return copy

    def reload(self, record: LiveRecord) -> Copy | None:
        """Start the copy back; nothing is copied if the original turns out to be alive still. Raises DeviceFull."""
        storage = record.origin() if record.origin is not None else None
        if storage is not None:
            record.flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            return None
        assert record.slot is not None
        try:
            record.flat, copy = self.engine.reload(record.slot)
        except torch.OutOfMemoryError as error:
            raise DeviceFull from error
        self.counters.back += record.nbytes
        self.storages.count_made(record.flat.untyped_storage())
        self._note("back", record, copy)
        return copy

    def wait(self, record: LiveRecord, lane: Lane) -> None:
        """Wait for the record's copy out or back. Raises its error if it failed."""
        copy = record.departure if lane == "out" else record.arrival
        assert copy is not None
        began = time.perf_counter()
        try:
            copy.wait()
        finally:
            waited = time.perf_counter() - began
            if lane == "out":
                self.counters.stall_out += waited
            else:
                self.counters.stall_in += waited

    def release(self, record: LiveRecord) -> None:
        """Let go of the record's storage. If a view was modified in place, using it raises an error anyway."""
        for view in record.views:
            view.vacate()
        record.flat = None

    def discard(self, record: LiveRecord) -> None:
        """Free the record's room in the tier below."""
        if record.slot is not None:
            self.engine.discard(record.slot)
            record.slot = None

    def forget(self, record: LiveRecord) -> None:
        """The record is dead: let go of what LMS made for it."""
        record.flat = None

    def _note(self, lane: Lane, record: LiveRecord, copy: Copy) -> None:
        if record.index >= 0:  # others are no part of the pass
            self.log.append((lane, record.index, copy))
