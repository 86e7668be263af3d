"""Carries records between the device and the tier below, and counts what was moved. Decides nothing."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Literal

import torch

from lms.memory.transfer import Copy
from lms.runtime.finished import Counters
from lms.torch.engine import Engine
from lms.torch.records import LiveRecord

Lane = Literal["out", "back"]
Log = list[tuple[Lane, int, Copy]]  # direction, record, copy


class Mover:
    """The stepper's mover for PyTorch's tensors. Called under the swapper's lock."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine = engine
        self.device = device
        self.counters = Counters()
        self.log: Log = []  # copies of the pass under way
        self._present = 0
        self._gone: deque[int] = deque()  # bytes of storages that died, on whatever thread held them last
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # saved storages on the device

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
        """Start the copy back; nothing is copied if the original turns out to be alive still."""
        storage = record.origin() if record.origin is not None else None
        if storage is not None:
            record.flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            return None
        assert record.slot is not None
        record.flat, copy = self.engine.reload(record.slot)
        self.counters.back += record.nbytes
        self.watch(record.flat.untyped_storage())
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

    def release(self, record: LiveRecord) -> bool:
        """Let go of the record's storage."""
        if any(view.changed for view in record.views):
            return False
        for view in record.views:
            view.vacate()
        record.flat = None
        return True

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

    # Saved storages on the device

    @property
    def present(self) -> int:
        """Bytes of saved storages on the device, those that only the script keeps included."""
        while self._gone:
            self._present -= self._gone.popleft()
        return self._present

    def count_present(self, storage: weakref.ref[torch.UntypedStorage], key: int, nbytes: int) -> None:
        """Count the bytes of the storage with this key until `storage_died`."""
        known = self._alive.get(key)
        if known is None or known() is None:
            self._alive[key] = storage
            self._present += nbytes

    def storage_died(self, storage: weakref.ref[torch.UntypedStorage], key: int, nbytes: int) -> None:
        """To be called when the storage dies, on whatever thread held it last."""
        if self._alive.get(key) is storage and self._alive.pop(key, None) is not None:
            self._gone.append(nbytes)

    def watch(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that LMS made, or that a pass has left behind, for as long as it lives."""
        key, nbytes = storage._cdata, storage.nbytes()
        self.count_present(weakref.ref(storage, lambda died: self.storage_died(died, key, nbytes)), key, nbytes)

    def uncount(self, storage: torch.UntypedStorage) -> None:
        """The storage turned out to be the script's: it counts with everything that LMS does not hold."""
        if self._alive.pop(storage._cdata, None) is not None:
            self._present -= storage.nbytes()

    def recount(self, left: Iterable[LiveRecord]) -> None:
        """Count, from a pass's beginning on, only the storages of records that were `left` behind."""
        self._alive.clear()
        self._gone.clear()
        self._present = 0
        for record in left:
            storage = record.storage()
            if storage is not None:
                self.watch(storage)
