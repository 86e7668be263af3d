"""The storages of saved tensors: which are on the device, and whether the script keeps them, too."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable

import torch

from lms.runtime.recorder import Recorder
from lms.torch.records import LiveRecord, Origin


class Storages:
    """Counts saved storages for as long as they live.

    All but `judge`, `_died` and `_dead` run under the swapper's lock.
    """

    def __init__(self) -> None:
        self.by_key: dict[tuple[int, ...], LiveRecord] = {}  # live records by storage and version
        self.unjudged: deque[tuple[Recorder, LiveRecord]] = deque()  # a backward worked on them when they died
        self._present = 0
        self._gone: deque[int] = deque()  # bytes of storages that died, on whatever thread held them last
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # those on the device

    # Which are on the device

    @property
    def present(self) -> int:
        """Bytes of saved storages on the device, those that only the script keeps included."""
        while self._gone:
            self._present -= self._gone.popleft()
        return self._present

    def count(self, storage: weakref.ref[torch.UntypedStorage], key: int, nbytes: int) -> None:
        """Count the bytes of the storage with this key until it is dead."""
        known = self._alive.get(key)
        if known is None or known() is None:
            self._alive[key] = storage
            self._present += nbytes

    def count_made(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that LMS made, or that a pass has left behind, for as long as it lives."""
        key, nbytes = storage._cdata, storage.nbytes()
        self.count(weakref.ref(storage, lambda died: self._dead(died, key, nbytes)), key, nbytes)

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
                self.count_made(storage)

    def _dead(self, storage: weakref.ref[torch.UntypedStorage], key: int, nbytes: int) -> None:
        if self._alive.get(key) is storage and self._alive.pop(key, None) is not None:
            self._gone.append(nbytes)

    # Who keeps them

    def lose(self, record: LiveRecord) -> None:
        """The record is not to be found by its storage any more."""
        if self.by_key.get(record.key) is record:
            self.by_key.pop(record.key, None)

    def watch(self, record: LiveRecord, recorder: Recorder, storage: torch.UntypedStorage) -> Origin:
        """Note when this storage of `record`, which the forward made, dies."""
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
        self.lose(record)
        if record.let_go and record.index >= 0:
            recorder.let_go[record.index] = recorder.position
        self._dead(origin, record.key[0], record.nbytes)

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
            self.uncount(storage)
