"""Python's side of the passes that C++ leads: it attends those accesses at which something moves, or may move."""

from __future__ import annotations

import torch

from lms.core.stepper import Stepper
from lms.torch.live_records import LiveRecords
from lms.torch.native_hooks import Led, NativeHooks, Saved
from lms.torch.open_graphs import OpenGraphs
from lms.torch.passes import Pass
from lms.torch.records import Handle, LiveRecord, View
from lms.torch.storages import Storages


class LedPasses:
    """Leads one pass at a time. Runs under the swapper's lock.

    An access that Python attends begins with `attend`. `save`, `use` or `use_record` then asks C++ whether it is the
    planned one. If so, `follow` ends it; if not, `take_over` ends the lead.
    """

    def __init__(
        self,
        native: NativeHooks,
        stepper: Stepper[LiveRecord],
        records: LiveRecords,
        storages: Storages,
        open_graphs: OpenGraphs,
    ) -> None:
        self._native = native
        self._stepper = stepper
        self._records = records
        self._storages = storages
        self._open = open_graphs
        self._run: Pass | None = None  # the one that is led

    def begin(self, run: Pass) -> bool:
        """Have C++ lead the pass that begins, if it has a plan and needs no measuring. Returns whether C++ leads."""
        guide, recorder, native = run.guide, run.recorder, self._native
        if guide is None or recorder.measure:
            return False
        native.lead(guide.codes, guide.course.cap, guide.sizes, guide.pinned, guide.moves, recorder.timed)
        if native.leading:
            run.hand_over()
            self._run = run
        return native.leading

    def attend(self) -> None:
        """An access comes."""
        native = self._native
        native.attend()
        self._stepper.skip_to(native.position, native.held)

    def save(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Handle | Saved | None:
        """What autograd is to keep. None: this is not the planned save."""
        saved = self._native.save(tensor)
        if not isinstance(saved, int):
            if saved is not None:
                self.follow(None, read=False)
            return saved
        run = self._run
        assert run is not None
        view, record = View(tensor), run.records.get(saved)
        if record is None:
            record = self._records.make(run.recorder, saved, (storage._cdata, tensor._version), storage)
            self._stepper.add(record)
        else:
            self._records.rewritten(record, view)
        handle = self._records.handle(record, view)
        self.follow(record, read=False)
        return handle

    def use(self, saved: Saved) -> torch.Tensor | None:
        """What C++ keeps. None: this is not the planned use."""
        tensor = self._native.use(saved)
        if tensor is not None:
            self.follow(None, read=True)
        return tensor

    def use_record(self, record: LiveRecord) -> bool:
        """Whether the use of this record, which moves, is the planned one."""
        return self._native.use_record(record.index)

    def follow(self, record: LiveRecord | None, *, read: bool) -> None:
        """Do what the schedule has for the access that C++ just noted. `record` is None if it does not move."""
        native, stepper, run = self._native, self._stepper, self._run
        assert run is not None
        position = native.position - 1
        stepper.skip_to(position, native.held)
        if not stepper.exceeds:
            stepper.access(record, read=read)
            native.leave(stepper.holdings.own, stepper.next_due)
            return
        # Now all records may have to leave, so Python must know them all.
        native.leave(stepper.holdings.own, 0)
        over = self.take_over()
        assert not over
        run.recorder.reenter()
        stepper.position = position
        stepper.access(run.records[run.recorder.order[position]], read=read)
        run.recorder.leave(stepper.holdings.held, self._storages.present)

    def free(self, record: LiveRecord) -> None:
        """The last handle on `record`, which moves, is gone."""
        try:
            self._stepper.holdings.free(record)
        finally:
            self._native.free(record.index, self._stepper.holdings.own)

    def take_over(self) -> bool:
        """Python takes the pass over from C++. Returns whether the pass is over."""
        run, self._run = self._run, None
        assert run is not None
        led = Led(*self._native.take())
        self._open.last_use = led.last_use or self._open.last_use
        recorder, known = run.recorder, run.take_over(led)
        for nbytes, pinned in zip(recorder.nbytes, recorder.foreseen, strict=True):
            self._records.note(nbytes, owned=pinned)
        self._records.adopt(recorder, known, led.open)
        recorder.broken |= led.pending
        return bool(led.tasks) and -1 not in led.freed
