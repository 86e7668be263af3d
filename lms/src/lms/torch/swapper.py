"""The saved-tensor swapper: packs and unpacks what autograd saves, and moves it by a plan or, without one, by a rule.

The rule for a pass that no plan is known for: evict the oldest record first, bring the newest back first, within the
budget. Autograd works as a stack, so the oldest record is the one needed last.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lms.tiers.device import Device
from lms.torch.engine import Engine
from lms.torch.guide import Guide, Key
from lms.torch.records import Ended, Handle, Kept, LiveRecord, State, View, movable
from lms.torch.recorder import Recorder

AHEAD = 4  # records that a pass without a plan brings back ahead of their use


@dataclass
class Counters:
    """What the swapper counted. Bytes and seconds."""

    out: int = 0
    back: int = 0
    stall_out: float = 0.0
    stall_in: float = 0.0
    hook: float = 0.0  # processor time
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


@dataclass
class Finished:
    """A complete pass, for the session to make a plan of."""

    recorder: Recorder
    guide: Guide | None  # the plan for just this sequence of accesses; None when none is known
    counters: Counters
    seconds: float


@dataclass
class Pass:
    """The pass under way."""

    recorder: Recorder
    guide: Guide | None
    late: bool = False  # it diverged from its plan; `guide` is another one, or none
    started: float = field(default_factory=time.perf_counter)
    records: list[LiveRecord] = field(default_factory=list)  # by index; the dead ones too
    next_return: int = 0  # into guide.returns
    drops: list[int] = field(default_factory=list)  # clean records to drop at the next access
    oldest: int = 0  # while the forward lasts, no record before it is on the device
    forward: bool = True  # no record has been used yet
    before: Counters = field(default_factory=Counters)


class SavedTensorSwapper:
    """Pack and unpack hooks for `torch.autograd.graph.saved_tensors_hooks`, and all that moves behind them.

    `budget` gives the bytes that may stay in a pass without a plan; it is asked at each access. `choose` gives the
    guide for a pass that begins with the given accesses, `recorder` a new recorder. All three are the session's.
    """

    def __init__(
        self,
        device: Device,
        torch_device: torch.device,
        engine: Engine,
        *,
        min_size: int,
        budget: Callable[[], int],
        choose: Callable[[list[Key]], Guide | None],
        recorder: Callable[[int], Recorder],
        module: Callable[[], str],
    ) -> None:
        self.device = device
        self.torch_device = torch_device
        self.engine = engine
        self.min_size = min_size
        self.budget = budget
        self.choose = choose
        self.new_recorder = recorder
        self.module = module
        self.counters = Counters()
        self.held = 0  # bytes of records that LMS keeps on the device, copies in flight included
        self.present = 0  # bytes of saved storages on the device, whoever keeps them
        self.largest = 0
        self.live = 0
        self.active = True
        self._when_idle: Callable[[], None] | None = None  # called when no record is live any more
        self.finished: deque[Finished] = deque(maxlen=8)
        self.write_ahead: int | None = None
        self._lock = threading.Lock()
        self._ended = Ended()
        self._ended.drain = self._drain_if_free
        self._pass: Pass | None = None
        self._by_key: dict[tuple[int, int], LiveRecord] = {}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # saved storages on the device
        self._stays: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # parameters, buffers, long-lived inputs
        self._leaving: deque[LiveRecord] = deque()  # oldest first
        self._abandoned: list[LiveRecord] = []  # freed while their copy back was in flight

    # What autograd calls

    def pack(self, tensor: torch.Tensor) -> Handle | Kept:
        """What autograd is to keep instead of `tensor`."""
        if not self.active or not movable(tensor, self.torch_device):
            return Kept(tensor)
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return Kept(tensor)  # a wrapper without memory of its own
        if storage.nbytes() < self.min_size or self._must_stay(tensor, storage):
            return Kept(tensor)
        began = time.thread_time()
        with self._lock:
            handle = self._pack(tensor, storage, began)
        self._drain_if_free()
        return handle

    def unpack(self, packed: Handle | Kept) -> torch.Tensor:
        """The saved tensor, bit for bit. Raises as plain autograd does when it was changed in place since."""
        if isinstance(packed, Kept):
            View.check(packed)  # type: ignore[arg-type]
            return packed.alias
        packed.view.check()
        began = time.thread_time()
        with self._lock:
            tensor = self._unpack(packed, began)
        self._drain_if_free()
        return tensor

    def stays(self, storage: torch.UntypedStorage) -> None:
        """Never move this storage: a parameter's, a buffer's."""
        key = storage._cdata
        forget = self._stays
        self._stays[key] = weakref.ref(storage, lambda _: forget.pop(key, None))

    def stop(self, then: Callable[[], None]) -> None:
        """Take on nothing more; `then` is called as soon as no record is live."""
        self.active = False
        with self._lock:
            self._drain()
            idle = self.live == 0
            if not idle:
                self._when_idle = then
        if idle:
            then()

    # The two hooks, inside the lock

    def _pack(self, tensor: torch.Tensor, storage: torch.UntypedStorage, began: float) -> Handle:
        self._drain()
        self._settle()
        run = self._pass or self._begin(storage.nbytes())
        recorder = run.recorder
        recorder.enter()
        key = (storage._cdata, tensor._version)
        record = self._by_key.get(key)
        if record is None or record.origin is None or record.origin() is not storage:
            record = self._new(run, key, tensor, storage)
        view = View(tensor)
        record.views.append(view)
        if record.state in (State.OUT, State.COMING, State.BACK):
            view.vacate()
        self._step(run, "save", record)
        self._leave(run, began)
        return Handle(record, view, self._ended)

    def _unpack(self, packed: Handle, began: float) -> torch.Tensor:
        self._drain()
        self._settle()
        record, view = packed.record, packed.view
        run = self._pass
        assert run is not None  # a handle is live, so a pass is under way
        run.recorder.enter()
        run.forward = False
        self._bring(run, record)
        self._step(run, "use", record)
        tensor = view.alias if record.flat is None else view.over(record.flat)
        self._leave(run, began)
        return tensor

    def _begin(self, nbytes: int) -> Pass:
        guide = self.choose([("save", 0, nbytes)])
        self._pass = Pass(self.new_recorder(self.present), guide, before=self.counters.copy())
        self.counters.held_peak = 0
        return self._pass

    def _leave(self, run: Pass, began: float) -> None:
        run.recorder.leave(self.held, self.present)
        self.counters.hook += time.thread_time() - began

    def _must_stay(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        known = self._stays.get(storage._cdata)
        if known is not None and known() is storage:
            return True
        base = tensor._base if tensor._base is not None else tensor
        if base.is_leaf and base.requires_grad:
            self.stays(storage)
            return True
        return False

    def _new(self, run: Pass, key: tuple[int, int], tensor: torch.Tensor, storage: torch.UntypedStorage) -> LiveRecord:
        index = len(run.records)
        record = LiveRecord(index, key, storage)
        guide = run.guide
        if guide is not None and guide.expects(run.recorder.position, ("save", index, record.nbytes)):
            record.pinned = guide.pinned[index]
        recorder = run.recorder

        def died(_: object) -> None:
            # Before the address can serve another storage, nobody must find this record by it any more.
            if self._by_key.get(key) is record:
                del self._by_key[key]
            if record.state is not State.DEAD:
                recorder.let_go[index] = recorder.position

        record.origin = weakref.ref(storage, died)
        self._count_present(storage)
        self._by_key[key] = record
        run.records.append(record)
        dtype = str(tensor.dtype).removeprefix("torch.")
        recorder.new(record.nbytes, (self.module(), dtype, tuple(tensor.shape)), pinned=record.pinned)
        self.live += 1
        if not record.pinned:
            self.largest = max(self.largest, record.nbytes)
            self._hold(record)
        return record

    # One access, by the plan or by the rule (lms.schedule has the steps)

    def _step(self, run: Pass, kind: str, record: LiveRecord) -> None:
        recorder = run.recorder
        position = recorder.position
        recorder.access(kind, record.index)
        guide = run.guide
        if guide is not None and not guide.expects(position, (kind, record.index, record.nbytes)):
            guide = run.guide = self.choose(recorder.keys())
            run.late = True
            run.next_return = 0
            if guide is not None:
                self._catch_up(run, guide, position)
        for index in run.drops:
            self._drop(run.records[index])
        run.drops.clear()
        if guide is None:
            self._by_rule(run, kind, record)
        else:
            self._by_plan(run, guide, position, record)

    def _by_plan(self, run: Pass, guide: Guide, position: int, record: LiveRecord) -> None:
        for move in guide.starts.get(position, ()):
            mover = run.records[move.record]
            if move.write and not mover.clean:
                self._send(run, mover)
            elif mover is not record or move.after == position:
                run.drops.append(move.record)
        cap = guide.plan.cap[position]
        self._make_room(run, cap, record, ahead=guide.plan.write_ahead)
        returns = guide.returns
        while run.next_return < len(returns) and returns[run.next_return].fetch <= position:
            move = returns[run.next_return]
            if move.record < len(run.records):
                comer = run.records[move.record]
                if comer.state is State.LEAVING:
                    comer.state = State.HERE  # not gone yet, so it stays
                elif comer.state is State.OUT and move.before > position:
                    if self.held + comer.nbytes > cap:
                        break
                    self._fetch(run, comer)
            run.next_return += 1

    def _catch_up(self, run: Pass, guide: Guide, position: int) -> None:
        """Start what another plan would have started by now."""
        for earlier in range(position):
            for move in guide.starts.get(earlier, ()):
                self._send(run, run.records[move.record])

    def _by_rule(self, run: Pass, kind: str, record: LiveRecord) -> None:
        budget = self.budget()
        # Copies out start while some room is left, so that few are waited for.
        mark = budget - min(budget // 4, 4 * self.largest)
        going = sum(r.nbytes for r in self._leaving if r.state is State.LEAVING)
        while self.held - going > mark:
            # What the forward saved just now can leave too: the operation at hand keeps it for as long as it needs it.
            victim = self._victim(run, None if kind == "save" else record)
            if victim is None:
                break
            if victim.clean:
                self._drop(victim)
            else:
                self._send(run, victim)
                going += victim.nbytes
        self._make_room(run, budget, None if kind == "save" else record, ahead=self.write_ahead)
        if kind == "use":
            self._bring_ahead(run, record, mark)

    def _bring_ahead(self, run: Pass, record: LiveRecord, room: int) -> None:
        for index in range(record.index - 1, max(-1, record.index - 1 - AHEAD), -1):
            older = run.records[index]
            if older.state is State.OUT and not older.pinned:
                if self.held + older.nbytes > room:
                    return
                self._fetch(run, older)

    def _victim(self, run: Pass, in_hand: LiveRecord | None) -> LiveRecord | None:
        """The oldest record on the device that is not in hand: the one that the backward needs last."""
        for index in range(run.oldest if run.forward else 0, len(run.records)):
            record = run.records[index]
            if record.state in (State.HERE, State.BACK) and record is not in_hand and record.held:
                return record
            if index == run.oldest and record.state is not State.HERE:
                run.oldest += 1
        return None

    # Moving one record

    def _hold(self, record: LiveRecord) -> None:
        record.held = record.nbytes
        self.held += record.nbytes
        self.counters.held_peak = max(self.counters.held_peak, self.held)

    def _unhold(self, record: LiveRecord) -> None:
        self.held -= record.held
        record.held = 0

    def _send(self, run: Pass, record: LiveRecord) -> None:
        """Start a copy out."""
        if record.state is not State.HERE or record.pinned or not record.views:
            return
        if any(view.alias._version != view.version for view in record.views):
            return  # changed in place: unpack will say so, and there is nothing to save
        record.slot, record.departure = self.engine.offload(record.source())
        record.state = State.LEAVING
        self._leaving.append(record)
        self.counters.out += record.nbytes
        run.recorder.copies.append(("out", record.index, record.departure))

    def _fetch(self, run: Pass, record: LiveRecord) -> None:
        """Start a copy back; nothing is copied when somebody kept the original alive after all."""
        storage = record.origin() if record.origin is not None else None
        if storage is not None:
            record.flat = torch.empty(0, dtype=torch.uint8, device=self.torch_device).set_(storage)  # type: ignore[call-overload]
            record.state = State.BACK
        else:
            assert record.slot is not None
            record.flat, record.arrival = self.engine.reload(record.slot)
            record.state = State.COMING
            self.counters.back += record.nbytes
            self._count_present(record.flat.untyped_storage())
            run.recorder.copies.append(("back", record.index, record.arrival))
        self._hold(record)

    def _count_present(self, storage: torch.UntypedStorage) -> None:
        """Count the storage's bytes for as long as it lives, whoever keeps it."""
        key, nbytes = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is not None and known() is storage:
            return

        def died(_: object) -> None:
            self._alive.pop(key, None)
            self.present -= nbytes

        self._alive[key] = weakref.ref(storage, died)
        self.present += nbytes

    def _bring(self, run: Pass, record: LiveRecord) -> None:
        """Make the record resident, whatever it takes."""
        if record.state is State.LEAVING:
            record.state = State.HERE
        if record.state is State.OUT:
            guide = run.guide
            self.counters.misses += guide is None or (record.index, run.recorder.position) not in guide.on_demand
            cap = guide.plan.cap[min(run.recorder.position, len(guide.keys) - 1)] if guide else self.budget()
            self._make_room(run, cap - record.nbytes, record, ahead=None)
            self._fetch(run, record)
        if record.state is State.COMING:
            assert record.arrival is not None
            began = time.perf_counter()
            record.arrival.wait()
            self.counters.stall_in += time.perf_counter() - began
            record.arrival = None
            record.state = State.BACK

    def _drop(self, record: LiveRecord) -> None:
        """Let go of a record whose bytes the tier below holds."""
        if record.state is State.HERE:
            if any(view.alias._version != view.version for view in record.views):
                return
            for view in record.views:
                view.vacate()
        elif record.state is not State.BACK:
            return
        record.flat = None
        record.state = State.OUT
        self._unhold(record)

    def _make_room(self, run: Pass, cap: int, in_hand: LiveRecord | None, ahead: int | None) -> None:
        """Wait for copies out, oldest first, until at most `cap` bytes are held.

        A pass that no plan leads, or that came to its plan late, evicts when none is under way.
        """
        while self.held > cap or (ahead is not None and len(self._leaving) > ahead):
            if self._leaving:
                departure = self._leaving[0].departure
                if departure is not None and self._leaving[0].state is State.LEAVING:
                    began = time.perf_counter()
                    departure.wait()
                    self.counters.stall_out += time.perf_counter() - began
                self._depart(self._leaving.popleft())
                continue
            victim = self._victim(run, in_hand) if run.guide is None or run.late else None
            if victim is None:
                return
            if victim.clean:
                self._drop(victim)
            else:
                self._send(run, victim)
                if victim.state is not State.LEAVING:
                    return

    # Copies that are complete, and records that nobody needs any more

    def _settle(self, *, raising: bool = True) -> None:
        """Give back what complete copies free. Raises the error of a copy out that failed."""
        while self._leaving:
            departure = self._leaving[0].departure
            if departure is not None and not departure.done():
                break
            self._depart(self._leaving.popleft(), raising=raising)
        if self._abandoned:
            waiting = []
            for record in self._abandoned:
                if record.arrival is not None and not record.arrival.done():
                    waiting.append(record)
                else:
                    record.arrival = record.flat = None
                    self._unhold(record)
            self._abandoned = waiting

    def _depart(self, record: LiveRecord, *, raising: bool = True) -> None:
        """The record's copy out is complete."""
        failed = record.departure.failed if record.departure is not None else None
        record.departure = None
        if record.state is State.DEAD:
            self._unhold(record)
        elif failed is not None:
            assert record.slot is not None
            self.engine.discard(record.slot)
            record.slot, record.state = None, State.HERE
            if raising:
                raise failed
        elif record.state is State.LEAVING:
            record.state = State.HERE
            self._drop(record)

    def _drain_if_free(self) -> None:
        """Deal with the handles that ended, unless somebody holds the lock: then they will."""
        while self._ended.queue and self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def _drain(self) -> None:
        queue = self._ended.queue
        while queue:
            record, view = queue.popleft()
            record.views.remove(view)
            if not record.views:
                view.vacate()
                self._die(record)

    def _die(self, record: LiveRecord) -> None:
        run = self._pass
        assert run is not None
        recorder = run.recorder
        recorder.freed[record.index] = recorder.position
        if record.state is not State.COMING:
            record.flat = None
        if record.departure is None and record.origin is not None and record.origin() is not None:
            recorder.pinned[record.index] = True  # LMS and autograd let go of it, and it is still there
        if self._by_key.get(record.key) is record:
            del self._by_key[record.key]
        if record.slot is not None:
            self.engine.discard(record.slot)
        if record.state is State.COMING:
            self._abandoned.append(record)
        elif record.departure is None:
            self._unhold(record)
        record.state = State.DEAD
        self.live -= 1
        if self.live == 0:
            self._end(run)

    def _end(self, run: Pass) -> None:
        """No record is live: the pass is complete."""
        self._pass = None
        run.recorder.finish()
        guide = run.guide
        whole = guide is not None and run.recorder.position == len(guide.keys)
        seconds = time.perf_counter() - run.started
        self.finished.append(
            Finished(run.recorder, guide if whole else None, self.counters.since(run.before), seconds)
        )
        if self._when_idle is not None:
            self._when_idle()
