"""One record's ways: out, away, back. Counts what is held and what was moved; decides nothing."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from lms.errors import SpillError, afresh
from lms.memory.transfer import Copy
from lms.torch.engine import Engine
from lms.torch.records import LiveRecord, State

Log = list[tuple[Literal["out", "back"], int, Copy]]  # direction, record, copy


@dataclass
class Counters:
    """What was moved and waited for. Bytes and seconds."""

    out: int = 0
    back: int = 0
    stall_out: float = 0.0
    stall_in: float = 0.0
    hook: float = 0.0  # in LMS, waiting left out
    misses: int = 0
    held_peak: int = 0

    def since(self, before: Counters) -> Counters:
        """The difference to an earlier state; the peak is not a sum and stays."""
        return Counters(
            self.out - before.out,
            self.back - before.back,
            self.stall_out - before.stall_out,
            self.stall_in - before.stall_in,
            self.hook - before.hook,
            self.misses - before.misses,
            self.held_peak,
        )

    def copy(self) -> Counters:
        """A snapshot."""
        return Counters(**self.__dict__)


class Mover:
    """Carries records between the device and the engine's tiers. Called under the swapper's lock."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine = engine
        self.device = device
        self.counters = Counters()
        self.held = 0  # bytes of records that LMS keeps on the device, copies in flight included
        self.log: Log = []  # copies of the pass under way
        self.left = 0  # of that, bytes of records that passes which are over have left behind
        self.evictable: dict[int, LiveRecord] = {}  # by index: held, not pinned, and not on their way
        self._behind = 0  # the least index: records that were left behind have negative ones
        self._leaving: deque[LiveRecord] = deque()  # oldest first
        self._staying: list[LiveRecord] = []  # came back into use while their copy out was in flight
        self._abandoned: list[LiveRecord] = []  # freed while their copy back was in flight
        self._present = 0
        self._gone: deque[int] = deque()  # bytes of storages that died, on whatever thread held them last
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # saved storages on the device

    @property
    def present(self) -> int:
        """Bytes of saved storages on the device, whoever keeps them."""
        while self._gone:
            self._present -= self._gone.popleft()
        return self._present

    @property
    def leaving(self) -> int:
        """Bytes on their way out that will be free once they have arrived."""
        return sum(record.nbytes for record in self._leaving if record.state is State.LEAVING)

    @property
    def in_flight(self) -> int:
        """Copies out that have not been waited for."""
        return len(self._leaving)

    def count_present(self, storage: torch.UntypedStorage) -> None:
        """Count the storage's bytes for as long as it lives, whoever keeps it."""
        key, nbytes = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is not None and known() is storage:
            return

        def died(_: object) -> None:
            self._alive.pop(key, None)
            self._gone.append(nbytes)

        self._alive[key] = weakref.ref(storage, died)
        self._present += nbytes

    def uncount(self, storage: torch.UntypedStorage) -> None:
        """The storage turned out to be somebody else's: it counts with everything that LMS does not hold."""
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
                self.count_present(storage)

    def leave_behind(self, record: LiveRecord) -> None:
        """The record's pass is over, and the record is not. It is the first to leave from now on."""
        evictable = self.evictable.pop(record.index, None)
        self._behind -= 1
        record.index = self._behind
        self.left += record.held
        if evictable is not None:
            self.evictable[record.index] = record

    def hold(self, record: LiveRecord) -> None:
        """Count a record as held."""
        record.held = record.nbytes
        self.held += record.nbytes
        if record.index < 0:
            self.left += record.nbytes
        self.counters.held_peak = max(self.counters.held_peak, self.held)
        self.evictable[record.index] = record

    def send(self, record: LiveRecord) -> None:
        """Have a record leave the storage that the forward made: by a copy out, or at once if the tier has its bytes.

        If the tensor was modified in place after it was saved, drop its bytes: using it raises an error anyway.
        """
        if record.state is not State.HERE or record.pinned or not record.views:
            return
        if record.clean:
            self.drop(record)
        elif record.departure is not None:
            self._staying.remove(record)
            self._leave(record)
        elif any(view.changed for view in record.views):
            if all(view.changed for view in record.views):
                self._vacate(record)
        else:
            record.slot, record.departure = self.engine.offload(record.source())
            self.counters.out += record.nbytes
            self._note("out", record, record.departure)
            self._leave(record)

    def keep(self, record: LiveRecord) -> None:
        """A record that was leaving stays; its copy out goes on, so that it can be dropped later."""
        record.state = State.HERE
        self._leaving.remove(record)
        self._staying.append(record)
        self.evictable[record.index] = record

    def fetch(self, record: LiveRecord) -> None:
        """Start a copy back of a record that is out; nothing is copied when somebody kept the original after all."""
        storage = record.origin() if record.origin is not None else None
        if record.slot is None:
            return  # it was changed in place, so that nobody can use it
        if storage is not None:
            record.flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            record.state = State.BACK
        else:
            record.flat, record.arrival = self.engine.reload(record.slot)
            record.state = State.COMING
            self.counters.back += record.nbytes
            self.count_present(record.flat.untyped_storage())
            self._note("back", record, record.arrival)
        self.hold(record)

    def bring(self, record: LiveRecord, cap: int, evict: Callable[[], bool], *, foreseen: bool = False) -> None:
        """Make a record resident and wait for it; if nothing was started, in room that is made under `cap` bytes.

        It is a miss unless it was `foreseen`.
        """
        if record.state is State.LEAVING:
            self.keep(record)
        if record.state is State.OUT:
            self.counters.misses += not foreseen
            self.make_room(cap - record.nbytes, evict)
            self.fetch(record)
        if record.arrival is not None:
            self.receive(record)

    def make_room(self, cap: int, evict: Callable[[], bool], ahead: int | None = None) -> None:
        """Wait for copies, of freed records and out of others, oldest first, until at most `cap` bytes are held.

        If none is under way, `evict` starts one, or says that there is none to start. At most `ahead` copies out stay
        in flight.
        """
        while self.held > cap or (ahead is not None and self.in_flight > ahead):
            if self.held > cap and self.wait_for_dead():
                continue
            if self.in_flight:
                self.wait_for_oldest()
                continue
            if not evict():
                return

    def evict(self, order: Iterable[int], in_hand: LiveRecord | None) -> bool:
        """Have the first of these evictable records leave that can and is not in hand. Whether one did."""
        for index in order:
            victim = self.evictable[index]
            if victim is in_hand:
                continue
            if victim.clean:
                self.drop(victim)
            else:
                self.send(victim)
            if victim.state in (State.LEAVING, State.OUT):
                return True
        return False

    def receive(self, record: LiveRecord) -> None:
        """Wait for the copy back of a record that is coming. Raises what the copy failed of.

        On a GPU each stream that uses the record has to wait, so the copy is kept until it is known to be over.
        """
        assert record.arrival is not None
        began = time.perf_counter()
        record.arrival.wait()
        self.counters.stall_in += time.perf_counter() - began
        if record.arrival.done():
            record.arrival = None
        record.state = State.BACK

    def drop(self, record: LiveRecord) -> None:
        """Let go of the memory of a record whose bytes the tier below holds."""
        if record.arrival is not None and record.arrival.done() and not record.arrival.failed:
            record.arrival, record.state = None, State.BACK  # it was brought ahead, and nobody came for it
        if record.state in (State.HERE, State.BACK) and record.clean and not any(v.changed for v in record.views):
            self._vacate(record)

    def free(self, record: LiveRecord) -> None:
        """The record's last view is gone."""
        if record.slot is not None:
            self.engine.discard(record.slot)
        self.evictable.pop(record.index, None)
        if record.state is State.COMING:
            self._abandoned.append(record)  # its memory is being written to
        else:
            record.flat = None
            if record.departure is None:
                self._unhold(record)
        record.state = State.DEAD

    def settle(self) -> None:
        """Give back what complete copies free. Raises the error of a copy out that failed."""
        while self._leaving:
            departure = self._leaving[0].departure
            assert departure is not None
            if not departure.done():
                break
            self._depart(self._leaving.popleft())
        for record in [r for r in self._staying if r.departure is not None and r.departure.done()]:
            self._staying.remove(record)
            self._depart(record)
        for record in [r for r in self._abandoned if r.arrival is None or r.arrival.done()]:
            self._abandoned.remove(record)
            record.arrival = record.flat = None
            self._unhold(record)

    def give_up(self) -> None:
        """Wait for what is in flight and take note of it; a copy out that failed has lost nothing that is needed."""
        for record in [*self._leaving, *self._staying, *self._abandoned]:
            copy = record.departure or record.arrival
            if copy is not None:
                with contextlib.suppress(SpillError):
                    copy.synchronize()
        while self._leaving or self._staying or self._abandoned:
            with contextlib.suppress(SpillError):
                self.settle()

    def wait_for_oldest(self) -> None:
        """Wait for the oldest copy out. Raises what it failed of."""
        record = self._leaving[0]
        assert record.departure is not None
        began = time.perf_counter()
        with contextlib.suppress(SpillError):  # _depart raises it, once the record is where it belongs
            record.departure.wait()
        self.counters.stall_out += time.perf_counter() - began
        self._depart(self._leaving.popleft())

    def wait_for_dead(self) -> bool:
        """Wait for one copy whose record was freed meanwhile, so that its memory is free; whether there was one."""
        record = next((r for r in (*self._abandoned, *self._staying) if r.state is State.DEAD), None)
        if record is None:
            return False
        began = time.perf_counter()
        if record.departure is not None:
            with contextlib.suppress(SpillError):  # nobody needs what may have failed
                record.departure.wait()
            self.counters.stall_out += time.perf_counter() - began
            self._staying.remove(record)
            self._depart(record)
        else:
            if record.arrival is not None:
                with contextlib.suppress(SpillError):
                    record.arrival.wait()
                self.counters.stall_in += time.perf_counter() - began
            self._abandoned.remove(record)
            record.arrival = record.flat = None
            self._unhold(record)
        return True

    def _note(self, lane: Literal["out", "back"], record: LiveRecord, copy: Copy) -> None:
        if record.index >= 0:  # others are no part of the pass
            self.log.append((lane, record.index, copy))

    def _leave(self, record: LiveRecord) -> None:
        record.state = State.LEAVING
        self._leaving.append(record)
        self.evictable.pop(record.index, None)

    def _vacate(self, record: LiveRecord) -> None:
        for view in record.views:
            view.vacate()
        record.flat = None
        record.state = State.OUT
        self._unhold(record)

    def _unhold(self, record: LiveRecord) -> None:
        self.held -= record.held
        if record.index < 0:
            self.left -= record.held
        record.held = 0
        self.evictable.pop(record.index, None)

    def _depart(self, record: LiveRecord) -> None:
        """The record's copy out is over."""
        assert record.departure is not None
        failed, record.departure = record.departure.failed, None
        if record.state is State.DEAD:
            self._unhold(record)
            return  # nobody needs what may have failed
        if failed is not None:
            assert record.slot is not None
            self.engine.discard(record.slot)
            record.slot = None
            if record.state is State.LEAVING:
                record.state = State.HERE
                self.evictable[record.index] = record
        elif record.state is State.LEAVING:
            record.state = State.HERE
            self.evictable[record.index] = record
            self.drop(record)
        if failed is not None:
            raise afresh(failed)
