"""The saved-tensor swapper: it decides which pass a saved tensor belongs to, and has the pass's stepper move it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import cast

import torch

from lms.core.guide import Guide
from lms.core.items import State
from lms.core.stepper import Stepper
from lms.core.turns import Rounds
from lms.errors import LMSError
from lms.runtime.planner import PassPlanner
from lms.runtime.recorder import Finished, Recorder
from lms.torch.cuda.streams import Stream
from lms.torch.dtensor import DTensorView
from lms.torch.engine import Engine
from lms.torch.led_passes import LedPasses
from lms.torch.live_records import LiveRecords
from lms.torch.movable import Movable
from lms.torch.mover import Mover
from lms.torch.native_hooks import Saved, native_hooks
from lms.torch.open_graphs import OpenGraphs, sequence_number
from lms.torch.passes import Pass
from lms.torch.records import Handle, LiveRecord, View

LANES = "lms-"  # how the names of the copying threads begin
# The backward that runs on this thread, -1 if none does. PyTorch has no public name for this.
graph_task: Callable[[], int] = torch._C._current_graph_task_id


class SavedTensorSwapper:
    """Pack and unpack hooks for `torch.autograd.graph.saved_tensors_hooks`.

    The `planner` is asked for a guide when a pass begins, and told of each pass that is over. It may plan then, so this
    happens without the lock. What it is asked in the middle of a pass is quick. `module` names the module that runs.
    """

    def __init__(
        self,
        device: torch.device,
        engine: Engine,
        planner: PassPlanner,
        *,
        min_size: int,
        module: Callable[[], str],
    ) -> None:
        self.mover = Mover(engine, device)
        self.planner = planner
        self.stepper: Stepper[LiveRecord] = Stepper(
            self.mover, room=planner.room, write_ahead=planner.maker.write_ahead
        )
        self.counters = self.mover.counters
        self.active = True
        self._finished: deque[Finished] = deque(maxlen=8)  # passes that the planner was not told of yet
        self._module = module
        self._when_idle: Callable[[], None] | None = None  # called when no record is live any more
        self.lock = threading.Lock()
        self._planning = threading.RLock()  # held while a pass is planned; taken before the other one
        # Dynamo must not compile this, nor the hooks. Only files that hold Ctrl-C back may call PyTorch's wrapper: a
        # destructor would swallow it.
        self._tidy = torch.compiler.disable(self._drain_if_free)
        self._pass: Pass | None = None
        self._stream: Stream | None = None  # the one that computed when the pass began
        self._copies: dict[int, bool] = {}  # whether the thread with this number copies
        self._open = OpenGraphs()
        self._rounds = Rounds()
        self._storages = self.mover.storages
        self.movable = Movable(device, min_size)
        self.native = native_hooks(device, min_size, self.movable.stay, lambda: self._tidy())
        self._records = LiveRecords(self.stepper, self._storages, self.movable.stayed, self._tidy)
        self._led = LedPasses(self.native, self.stepper, self._records, self._storages, self._open)

    @property
    def between_passes(self) -> bool:
        """Whether no pass is under way."""
        return self._pass is None

    @property
    def recorded(self) -> int:
        """Bytes of all records so far, without those that count as `owned`."""
        return self._records.saved

    @property
    def saw_nothing(self) -> bool:
        """Whether nothing was saved so far."""
        return not self.recorded and not any(self.movable.stayed.values())

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of the pass under way; None between two passes, and while C++ leads."""
        return self._pass.recorder if self._pass is not None and not self.native.leading else None

    def slow(self) -> None:
        """Something else took time between hooks: the times of the pass under way are no measurement."""
        if self._pass is not None:
            self._pass.recorder.slowed = True

    def recorded_as(self, tensor: torch.Tensor) -> int | None:
        """The number of the record that has this tensor's bytes in the pass under way, if there is one."""
        storage = tensor.untyped_storage()
        record = self._records.find((storage._cdata, tensor._version), storage, None)
        return record.index if record is not None and record.index >= 0 else None

    @property
    def live(self) -> int:
        """Records that autograd holds a handle on."""
        return self._records.count + self.native.live

    def _clock(self) -> float:
        """A clock that stands still while a copy is waited for. (The processor's own costs a system call.)"""
        counters = self.counters
        return perf_counter() - counters.stall_out - counters.stall_in

    # For autograd

    def pack(self, tensor: torch.Tensor) -> Handle | View | Saved:
        """The object that autograd is to keep instead of `tensor`."""
        if not self.active:
            return View(tensor)
        began = self._clock()
        found = self.movable.storage(tensor)
        if isinstance(found, str):
            kept = self.movable.kept(tensor, found)
            self.counters.hook += self._clock() - began
            return kept
        local, storage = found
        with self.lock:
            packed = self._pack(tensor, local, storage)
        if packed is None:
            # Planning takes up to a second, and other threads wait for the lock.
            with self._planning:
                with self.lock:
                    packed = self._pack(tensor, local, storage)  # another thread may have begun the pass meanwhile
                    present = self._storages.present
                if packed is None:
                    self.learn()
                    beginning = self.planner.begin(("write", 0, storage.nbytes()), present)
                    with self.lock:
                        packed = self._pack(tensor, local, storage, beginning)
            assert packed is not None
        self.counters.hook += self._clock() - began
        if self._records.ended or self.native.over:
            self._drain_if_free()
        if isinstance(packed, str):
            return self.movable.kept(tensor, packed)
        self._open.warn()
        return packed

    def unpack(self, packed: Handle | View | Saved) -> torch.Tensor:
        """The saved tensor, bit for bit. Raises as plain autograd does when it was changed in place since."""
        if not isinstance(packed, (Handle, View)):
            began = self._clock()
            with self.lock:
                used = self._use_led(packed)
            self.counters.hook += self._clock() - began
            if used is not None:
                if self._records.ended or self.native.over:
                    self._drain_if_free()
                return used
            packed = cast("Handle | None", packed.handle) or View(packed.alias, packed.version)
        if isinstance(packed, View):
            packed.check()
            return packed.alias
        if self.mover.engine.capturing():
            raise LMSError(
                "a tensor that was saved before a CUDA graph's capture began is used inside it, and LMS may have "
                "swapped it: capture the forward together with its backward, or close the session around the capture"
            )
        began = self._clock()
        packed.view.check()
        with self.lock:
            tensor = self._unpack(packed)
            self.counters.hook += self._clock() - began
        if self._records.ended or self.native.over:
            self._drain_if_free()
        return tensor

    def step(self, optimizer: int) -> None:
        """The optimizer with this number has stepped."""
        with self.lock:
            self._take_over()
            self._rounds.step(optimizer)

    def abandon(self) -> None:
        """In a forked child: take on nothing more, and wait for no copy: the copying threads stayed in the parent."""
        self.active = self.native.open = False
        self._records.abandon()

    def stop(self, then: Callable[[], None]) -> None:
        """Take on nothing more; `then` is called as soon as no record is live."""
        self.active = self.native.open = False
        with self.lock:
            self._take_over()
            self._drain()
            self.stepper.holdings.give_up()
            idle = self._records.count == 0
            if not idle:
                self._when_idle = then
        if idle:
            then()

    def judge(self) -> None:
        """Find out which storages the script keeps, so that all figures are complete; those of C++, too."""
        # Not with patience: the script's own code may run inside the lock, and ask for figures on the same thread.
        if self.lock.acquire(blocking=False):
            try:
                self._take_over()
                self._count_native()
            finally:
                self.lock.release()
        self._storages.judge()

    def learn(self) -> None:
        """Tell the planner of the passes that are over, with all of their figures."""
        self.judge()
        while self._finished:
            self.planner.note(self._finished.popleft())

    # Inside the lock

    def _pack(
        self,
        tensor: torch.Tensor,
        local: torch.Tensor,
        storage: torch.UntypedStorage,
        beginning: tuple[Guide | None, Recorder] | None = None,
    ) -> Handle | Saved | str | None:
        """A handle, or why the tensor stays. None: a pass begins, and `beginning` has to be found first."""
        if self.mover.engine.capturing():
            return "capture"  # the graph's kernels will run again with these addresses, and without our hooks
        self._catch_up()
        if self.native.leading:
            if local is tensor and (saved := self._led.save(tensor, storage)) is not None:
                return saved
            self._take_over()
        if self._pass is not None and self.mover.engine.stream() != self._stream:
            # Copies are ordered behind the pass's stream. No copy waits for what another stream does with the memory.
            return "stream"
        run = self._pass
        if run is not None and run.take_turn(in_backward=graph_task() != -1):
            self._leave_behind(run)
        run = self._pass
        if run is None:
            if beginning is None:
                self._storages.recount(self._open.records)
                return None
            guide, recorder = beginning
            choose = self.planner.choose
            run = Pass(self.stepper, self.mover, recorder, guide, choose=choose, rounds=self._rounds)
            self._pass, self._stream = run, self.mover.engine.stream()
            # On a GPU each access looks at the stream, and the host's clock says nothing.
            if not self._open.records and self._stream is None and self._led.begin(run):
                return self._pack(tensor, local, storage)
        run.recorder.enter()
        key: tuple[int, ...] = (storage._cdata, local._version)
        root: torch.Tensor | None = None
        if local is not tensor:
            # In-place operations on a DTensor count in the version that it shares with its views, and not in its local
            # tensor's. Another DTensor over the same storage has a version of its own, so it has a record of its own.
            root = tensor._base if tensor._base is not None else tensor
            key = (*key, id(root), tensor._version)
        view = View(local) if local is tensor else DTensorView(tensor, local)
        record = self._records.find(key, storage, root)
        if record is not None:
            writes = self._records.rewritten(record, view)
        else:
            record, writes = self._new(run, key, local, storage), True
            record.root = weakref.ref(root) if root is not None else None
        # Before what may raise, so that the record has an end.
        handle = self._records.handle(record, view)
        run.save(record, writes=writes)
        run.recorder.leave(self.stepper.holdings.held, self._storages.present)
        return handle

    def _unpack(self, packed: Handle) -> torch.Tensor:
        self._catch_up()
        record, view = packed.record, packed.view
        run = None if record in self._open.records else self._pass
        led = self.native.leading and self._led.use_record(record)
        if not led:
            self._take_over()
        if led or run is None:
            self.stepper.require(record)
        else:
            self._open.last_use = sequence_number()
            run.recorder.enter()
            run.require(record)
        if record.flat is not None:
            view.fill(record.flat)
        # A tensor of its own: the record may leave, and empty the alias, while the operation still works on this one.
        tensor = view.alias.detach()
        record.handed = weakref.ref(tensor)
        if led:
            self._led.follow(record, read=True)
        elif run is not None:
            run.use(record, graph_task())
            run.recorder.leave(self.stepper.holdings.held, self._storages.present)
        return view.wrap(tensor)

    def _leave_behind(self, run: Pass) -> None:
        """The pass is over, and some of its records are not: from now on they are moved if there is need, unplanned."""
        left = [record for record in run.records.values() if record.state is not State.DEAD]
        for record in left:
            self._storages.lose(record)
            self.stepper.holdings.leave_behind(record)
        self._open.add(left, told=run.recorder.truncated)
        self._finish(run)

    def _finish(self, run: Pass) -> None:
        self._pass = None
        self._finished.append(run.finish())

    def _new(self, run: Pass, key: tuple[int, ...], tensor: torch.Tensor, storage: torch.UntypedStorage) -> LiveRecord:
        record = self._records.make(run.recorder, len(run.records), key, storage)
        run.add(record, lambda: (self._module(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
        self._records.note(record.nbytes, owned=record.pinned)
        if not record.pinned:
            assert record.origin is not None
            self._storages.count(record.origin, key[0], record.nbytes)
        return record

    def _catch_up(self) -> None:
        """An access comes: first deal with all that was over before it."""
        self._drain()
        native, stepper = self.native, self.stepper
        if native.over or native.pending:  # an error has left the last access
            self._take_over()
        if native.leading:
            self._led.attend()
        stepper.holdings.settle()
        stepper.drop_due()

    # Passes that C++ leads

    def _use_led(self, saved: Saved) -> torch.Tensor | None:
        """What C++ keeps, if it leads and this is the planned use. Else the pass is taken over."""
        if saved.handle is not None or not self.native.leading:
            return None
        self._catch_up()
        tensor = self._led.use(saved) if self.native.leading else None
        if tensor is None:
            self._take_over()
        return tensor

    def _take_over(self) -> None:
        """If C++ leads the pass, take it over: to go on with it, or to finish it."""
        if self._pass is not None and self.native.leading:
            over = self._led.take_over()
            self._count_native()
            if over:
                self._finish(self._pass)

    def _count_native(self) -> None:
        native = self.native
        self.counters.hook += native.seconds
        self.movable.stayed["small"] += native.small
        self.movable.stayed["parameters"] += native.parameters
        native.seconds, native.small, native.parameters = 0.0, 0, 0

    # Ends of handles

    def _drain_if_free(self) -> None:
        """Deal with the handles that ended. If another thread holds the lock, that thread deals with them."""
        thread = get_ident()
        copies = self._copies.get(thread)
        if copies is None:
            copies = self._copies[thread] = threading.current_thread().name.startswith(LANES)
        if copies:
            self.native.wake()
            return  # the collector ran on a thread that copies; what it would wait for, only that thread can do
        if self._records.ended and self.mover.engine.capturing():
            return  # events must not be asked for while a CUDA graph is captured; the next access deals with them
        while (self._records.ended or self.native.over) and self.lock.acquire(blocking=False):
            began = self._clock()
            try:
                if self.native.over:
                    self._take_over()
                self._drain()
                self.counters.hook += self._clock() - began
            finally:
                self.lock.release()

    def _drain(self) -> None:
        for record in self._records.over():
            self._die(record)

    def _die(self, record: LiveRecord) -> None:
        run = self._pass
        if record in self._open.records:
            self._open.records.remove(record)
            self.stepper.holdings.free(record)
        else:
            assert run is not None
            leading, departure = self.native.leading, record.departure
            # While C++ leads, a copy may be over and not settled yet. One that failed has the storage still.
            is_over = departure is None or (leading and departure.done() and departure.failed is None)
            if leading:
                self._led.free(record)
            else:
                run.free(record)
            if is_over:
                self._storages.ended(run.recorder, record)
        if run is not None and run.live == 0 and not self.native.leading:
            self._finish(run)
        if self._records.count == 0 and self._when_idle is not None:
            self._when_idle()
        if not self.active:
            self.stepper.holdings.give_up()  # no further call will settle what is in flight
