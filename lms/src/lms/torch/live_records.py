"""The records that autograd holds a handle on: how they are made, found by their storage, and known to be over."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from lms.core.stepper import Stepper
from lms.runtime.recorder import Recorder
from lms.torch.native_hooks import Open, same_counter
from lms.torch.records import Handle, LiveRecord, View
from lms.torch.storages import Storages


class LiveRecords:
    """Makes records and their handles, and notes each handle that ends. All but `_end` runs under the swapper's lock.

    `tidy` is called after the end of each handle.
    """

    def __init__(
        self, stepper: Stepper[LiveRecord], storages: Storages, stayed: dict[str, int], tidy: Callable[[], None]
    ) -> None:
        self.count = 0  # without those that only C++ knows
        self.saved = 0  # bytes of all records so far, without those that count as `owned`
        self._stepper = stepper
        self._storages = storages
        self._stayed = stayed
        self._tidy = tidy
        self._ended: deque[tuple[LiveRecord, View]] = deque()  # handles that ended

    def find(self, key: tuple[int, ...], storage: torch.UntypedStorage, root: torch.Tensor | None) -> LiveRecord | None:
        """The record of this storage at this version, if there is one."""
        record = self._storages.by_key.get(key)
        return record if record is not None and record.holds(storage, root) else None

    def make(self, recorder: Recorder, index: int, key: tuple[int, ...], storage: torch.UntypedStorage) -> LiveRecord:
        """A record of this storage, number `index` of the pass."""
        record = LiveRecord(index, key, storage.nbytes())
        self._storages.by_key[key] = record
        self.count += 1
        self._storages.watch(record, recorder, storage)
        return record

    def rewritten(self, record: LiveRecord, view: View) -> bool:
        """Whether the bytes of this view may have changed since the record was saved last. A copy is then given up.

        Pieces of one storage may each have a version counter. One of them may change after another was saved, and reach
        the same version. All views of a DTensor have one counter, which the record was found by.
        """
        if record.root is not None or any(same_counter(one.alias, view.alias) for one in record.views):
            return False
        if record.stored:
            self._stepper.require(record)
            self._stepper.holdings.write(record)
        return True

    def handle(self, record: LiveRecord, view: View) -> Handle:
        """What autograd is to keep of one saved tensor."""
        record.views.append(view)
        if record.let_go:
            view.vacate()
        return Handle(record, view, self._end)

    def note(self, nbytes: int, *, owned: bool) -> None:
        """Count the bytes of a new record; `owned` is one that the script keeps."""
        if owned:
            self._stayed["owned"] += nbytes
        else:
            self.saved += nbytes

    def adopt(self, recorder: Recorder, known: Mapping[int, LiveRecord], found: Iterable[Open]) -> None:
        """Go on with what only C++ knew. `known` are the records of the pass by their number, empty if it is over."""
        for index, key, storage, handed, saved in found:
            record = known.get(index) or LiveRecord(index, key, recorder.nbytes[index])
            record.key = key
            record.handed = weakref.ref(handed) if handed is not None else None
            if storage is not None:
                self._storages.watch(record, recorder, storage)
            if not saved:
                self._storages.unjudged.append((recorder, record))
                continue
            self._storages.by_key[key] = record
            self.count += 1
            for one in saved:
                one.handle = self.handle(record, View(one.alias, one.version))

    # Ends of handles

    @property
    def ended(self) -> bool:
        """Whether handles ended that `over` has not dealt with yet."""
        return bool(self._ended)

    def _end(self, record: LiveRecord, view: View) -> None:
        """A handle ends. Its destructor may run on any thread, at any time, even inside the lock."""
        self._ended.append((record, view))
        self._tidy()

    def over(self) -> Iterator[LiveRecord]:
        """Deal with the handles that ended. Gives each record that has lost its last one."""
        while self._ended:
            record, view = self._ended.popleft()
            record.views.remove(view)
            if not record.views:
                del view.alias  # with the last of them goes the storage, unless the script keeps it
                self._storages.lose(record)
                self.count -= 1
                yield record

    def abandon(self) -> None:
        """In a forked child: deal with no handle any more."""
        self._ended = deque(maxlen=0)
