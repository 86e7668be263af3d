"""Who keeps the storages of records: autograd and LMS alone, or the script too."""

from __future__ import annotations

import weakref
from collections import deque

import torch

from lms.runtime.recorder import Recorder
from lms.torch.mover import Mover
from lms.torch.records import LiveRecord, Origin


class Owners:
    """Notes when a storage that the forward made dies, and whether the script keeps it once its record is dead."""

    def __init__(self, mover: Mover, by_key: dict[tuple[int, ...], LiveRecord]) -> None:
        self._mover = mover
        self._by_key = by_key
        self.unjudged: deque[tuple[Recorder, LiveRecord]] = deque()  # a backward worked on them when they died

    def watch(self, record: LiveRecord, recorder: Recorder, storage: torch.UntypedStorage) -> Origin:
        """Note when this storage of `record` dies."""
        record.origin = origin = Origin(storage, self._died)
        origin.record, origin.recorder = record, recorder
        return origin

    def _died(self, origin: weakref.ref[torch.UntypedStorage]) -> None:
        """A storage is gone.

        Runs on whatever thread held the storage last, so without the swapper's lock. Before the address can serve
        another storage, the record must not be found by it any more.
        """
        assert isinstance(origin, Origin)
        record, recorder = origin.record, origin.recorder
        del origin.record, origin.recorder  # record and origin hold each other
        if self._by_key.get(record.key) is record:
            self._by_key.pop(record.key, None)
        if record.let_go and record.index >= 0:
            recorder.let_go[record.index] = recorder.position
        self._mover.storage_died(origin, record.key[0], record.nbytes)

    def ended(self, recorder: Recorder, record: LiveRecord) -> None:
        """The record is dead: find out who keeps its storage, now that LMS and autograd have let go of it."""
        if record.origin is None:
            return
        if record.handed is not None and record.handed() is not None:
            # Or the backward has it still: compiled code lets go of what autograd saved before it works on it.
            self.unjudged.append((recorder, record))
        else:
            self._judge(recorder, record)

    def judge(self) -> None:
        """Judge the storages of those records that a backward worked on when they died."""
        while self.unjudged:
            self._judge(*self.unjudged.popleft())

    def _judge(self, recorder: Recorder, record: LiveRecord) -> None:
        storage = record.origin() if record.origin is not None else None
        at_work = record.handed is not None and record.handed() is not None
        recorder.pinned[record.index] = storage is not None and not at_work
        if storage is not None and not at_work:
            self._mover.uncount(storage)
