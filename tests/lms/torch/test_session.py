"""The life of a session, its promises about memory, and what it says about itself."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import socket
import threading
import warnings
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lms as package
from lms.core import drift
from lms.core.plan import Plan
from lms.core.schedule import Swap
from lms.core.trace import Trace
from lms.errors import CorruptionError, LimitError, LMSError, SpillError, UsageError
from lms.memory.device import CpuDevice, Device, Peak
from lms.memory.transfer import Copy
from lms.runtime import plan_maker
from lms.torch import session as session_module
from lms.torch.cpu import page_pool
from lms.torch.mover import Mover
from lms.torch.records import LiveRecord
from lms.torch.session import Session, disable, enable

Make = Callable[..., Session]
Live = Callable[[Session], int]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))


def loss_of(net: nn.Module) -> Tensor:
    torch.manual_seed(1)
    return net(torch.randn(64, 32)).square().mean()


def gradients(net: nn.Module, loss: Tensor | None = None) -> list[Tensor]:
    return list(torch.autograd.grad(loss_of(net) if loss is None else loss, list(net.parameters())))


def identical(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# Life


def test_sessions_do_not_nest(lms: Make) -> None:
    with lms() as outer:
        with pytest.raises(UsageError, match="do not nest"):
            lms().open()
        with pytest.raises(UsageError, match="do not nest"):
            enable(budget=0)
        net = model()
        gradients(net)
        assert outer.stats()["passes"] == 1
    gradients(net)
    assert outer.stats()["passes"] == 1, "a closed session sees nothing"


def test_now_and_then_memory_below_the_device_that_is_not_needed_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    trimmed: list[int] = []
    with Session(model, optimizer, budget=0) as session:
        monkeypatch.setattr(session.engine, "trim", lambda: trimmed.append(session.progress.steps))
        for _ in range(17):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
    assert trimmed == [8, 16]


def test_a_session_is_opened_once(lms: Make) -> None:
    session = lms()
    session.open().close()
    session.close()
    with pytest.raises(UsageError, match="make a new one"):
        session.open()


def test_enable_and_disable_in_any_order() -> None:
    disable()
    first = enable(budget=0, min_size=0)
    disable()
    disable()
    second = package.enable(budget=0, min_size=0)
    gradients(model())
    package.disable()
    assert first.stats()["passes"] == 0
    assert second.stats()["passes"] == 1


def test_a_session_that_could_not_open_leaves_room_for_another(lms: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("lms.torch.session.make_engine", lambda *_a, **_k: (_ for _ in ()).throw(SpillError("no disk")))
        with pytest.raises(SpillError, match="no disk"):
            lms().open()
    with lms() as session:
        gradients(model())
    assert session.stats()["passes"] == 1


def test_a_session_that_fails_while_it_opens_gives_everything_back(lms: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: CpuDevice) -> None:
        raise RuntimeWarning("the kernel refuses")  # as python -W error has it

    session = lms()
    with monkeypatch.context() as patch:
        patch.setattr(CpuDevice, "reset_peak", refuse)
        with pytest.raises(RuntimeWarning):
            session.open()
    pool = page_pool.find()
    assert pool is not None
    assert not pool.installed
    with pytest.raises(ValueError, match="closed"):
        session.engine.file.fileno()


def test_a_close_that_fails_still_retires_the_pool(lms: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(then: object) -> None:
        raise SpillError("the disk went away")

    session = lms().open()
    monkeypatch.setattr(session._swapper, "stop", fail)
    with pytest.raises(SpillError, match="went away"):
        session.close()
    pool = page_pool.find()
    assert pool is not None
    assert not pool.installed


def test_what_is_still_saved_at_the_end_can_be_used_and_then_everything_is_given_back(lms: Make, live: Live) -> None:
    net = model()
    theirs = gradients(net)
    session = lms().open()
    loss = loss_of(net)
    session.close()
    assert live(session) > 0
    assert session.engine.usage()["file"] > 0
    gradients(net)  # nobody watches
    assert identical(gradients(net, loss), theirs)
    assert live(session) == 0
    assert session.engine.usage()["file"] == 0
    with pytest.raises(ValueError, match="closed"):
        session.engine.file.fileno()


def test_a_session_is_closed_by_the_thread_that_opened_it(lms: Make) -> None:
    errors: list[BaseException] = []

    def close(session: Session) -> None:
        try:
            session.close()
        except UsageError as error:
            errors.append(error)

    with lms() as session:
        thread = threading.Thread(target=close, args=(session,))
        thread.start()
        thread.join()
        assert "thread" in str(errors[0])
        gradients(model())
        assert session.stats()["passes"] == 1, "it is still open"


def test_a_closed_session_and_its_graph_may_be_collected_together(lms: Make) -> None:
    session = lms().open()
    session.loss = loss_of(model())  # type: ignore[attr-defined]
    session.itself = session  # type: ignore[attr-defined]
    session.close()
    del session
    gc.collect()  # what a destructor does wrong, pytest reports as unraisable


@pytest.mark.timeout(60)
def test_a_finalizer_of_the_scripts_may_ask_for_figures(lms: Make) -> None:
    net, asked = model(), []
    refs = []  # of storages: their callbacks run while LMS deals with the end of a saved tensor
    with lms(budget=1 << 40) as session:
        for _ in range(3):
            hidden = net[1](net[0](torch.randn(64, 32)))
            refs.append(weakref.ref(hidden.untyped_storage(), lambda _: asked.append(session.stats())))
            loss = hidden.square().mean()
            del hidden
            loss.backward()
            del loss
    assert len(asked) == 3


@pytest.mark.timeout(60)
def test_a_plan_may_be_the_reason_to_stop(lms: Make) -> None:
    net = model()
    theirs = gradients(net)
    plans = []

    def stop(plan: object) -> None:
        plans.append(plan)
        disable()

    with lms(on_plan=stop):
        for _ in range(3):
            assert identical(gradients(net), theirs)
    assert len(plans) == 1


def test_a_forked_child_trains_plainly_and_may_have_a_session_of_its_own(lms: Make) -> None:
    net = model()
    theirs = gradients(net)
    with lms() as session:
        assert identical(gradients(net), theirs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            status = 1
            try:
                torch.set_num_threads(1)
                plain = identical(gradients(net), theirs)
                with Session(budget=0, min_size=0) as own:
                    swapped = identical(gradients(net), theirs)
                status = 0 if plain and swapped and own.stats()["swapped_out"] else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert identical(gradients(net), theirs)
        assert session.stats()["passes"] == 2


# Threads


def in_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action, name="another")
    thread.start()
    thread.join()


def test_training_on_another_thread_is_warned_of_once(lms: Make) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def train() -> None:
        for _ in range(3):
            loss_of(net).backward()
            optimizer.step()

    with lms(net), pytest.warns(RuntimeWarning, match=r"an optimizer steps on thread 'another'.*enabled") as warned:
        in_thread(train)
    assert len(warned) == 1


def test_forwards_that_all_run_on_another_thread_are_warned_of_at_the_second_step(lms: Make) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses: list[Tensor] = []

    def train() -> None:
        for _ in range(3):
            in_thread(lambda: losses.append(loss_of(net)))
            losses.pop().backward()
            optimizer.step()

    with lms(net), pytest.warns(RuntimeWarning, match=r"nothing was saved .*thread that enabled") as warned:
        train()
    assert len(warned) == 1


def test_evaluation_on_another_thread_causes_no_warning(lms: Make) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with warnings.catch_warnings(), lms(net):
        warnings.simplefilter("error")
        loss_of(net).backward()
        with torch.no_grad():
            in_thread(lambda: loss_of(net))
        optimizer.step()


def test_one_of_two_threads_opens_a_session(lms: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    made = session_module.device_for

    def device_for(device: torch.device) -> Device:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.5)  # the other one is on its way, if it ever gets so far
        return made(device)

    monkeypatch.setattr(session_module, "device_for", device_for)
    ends: list[object] = []

    def attempt() -> None:
        try:
            with lms() as session:
                ends.append(session)
                over.wait(timeout=10)
        except UsageError as error:
            ends.append(error)
            over.set()

    over = threading.Event()
    threads = [threading.Thread(target=attempt) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(end).__name__ for end in ends) == ["Session", "UsageError"]
    with lms():
        pass


def test_a_backward_on_another_thread_is_warned_of_and_right(lms: Make) -> None:
    net = model()
    theirs = gradients(net)
    ours: list[Tensor] = []
    with lms(net):
        loss = loss_of(net)
        with pytest.warns(RuntimeWarning, match="a backward runs on thread 'another'"):
            in_thread(lambda: ours.extend(gradients(net, loss)))
    assert identical(ours, theirs)


# What stays


def test_bytes_that_stay_are_counted_by_reason(lms: Make) -> None:
    class Named(Tensor):
        pass

    w = torch.randn(64, 64, requires_grad=True)
    batch = torch.randn(64, 64) * 1.0
    named = torch.randn(64, 64).as_subclass(Named)
    with lms(min_size=1000) as session:
        for _ in range(3):
            y = torch.tanh(w @ (w * batch))  # saves w and batch, which stay, a product and y
            loss = (y * named).as_subclass(Tensor).sum() + (y[0, 0] * w[:2, :2].exp()).sum()
            del y
            loss.backward()
        stats = session.stats()
    whole = 64 * 64 * 4
    assert stats["recorded"] == (3 * 2 + 1) * whole, "two in each pass, and batch until its end showed whose it is"
    assert stats["kept_parameters"] == 3 * whole
    assert stats["kept_owned"] == 2 * whole
    assert stats["kept_types"] == 3 * whole
    assert stats["kept_small"] >= 3 * 2 * 2 * 4
    assert stats["kept_stream"] == stats["kept_capture"] == stats["kept_device"] == 0


# Limits


def test_a_limit_below_the_floor_is_refused_before_the_second_step() -> None:
    net = model()
    with Session(net, limit="1MB", min_size=0) as session:
        loss_of(net).backward()
        with pytest.raises(LimitError) as refused:
            loss_of(net)
        told = str(refused.value)
        assert "limit 1" in told
        assert "floor" in told
        assert "module '" in told
        assert session._swapper.live == 0


@pytest.mark.parametrize(("grows_in", "ends"), [(1, True), (8, False)])
def test_memory_that_grows_ends_a_training_in_its_first_steps_only(
    grows_in: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters())
    with (
        Session(net, optimizer, frac=0.9, min_size=0) as session,
        pytest.raises(LimitError) if ends else pytest.warns(RuntimeWarning, match="cannot be kept any more"),
    ):
        peak, current = session.device.peak, session.device.current
        for step in range(12):
            if step == grows_in:  # by something that LMS has nothing to do with
                monkeypatch.setattr(session.device, "peak", lambda: Peak(*(n + session.limit for n in peak())))
                monkeypatch.setattr(session.device, "current", lambda: current() + session.limit)
            loss_of(net).backward()
            optimizer.step()
    stats = session.stats()
    assert session.over_limit > 0
    assert stats["passes"] == (2 if ends else 12)
    assert re.match(r"(after )?pass (1|2|8|9)\b", session.peak_where)


@pytest.mark.timeout(60)
def test_a_forked_child_drops_a_graph_whose_copies_are_the_parents(lms: Make, tier: object) -> None:
    tier.slow = True
    w = torch.randn(64, 64, requires_grad=True)
    with lms(budget=0):
        kept = (w @ w).tanh()  # its copies are in flight
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            tier.slow = None  # waiting for a copy now never ends
            del kept
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        del kept


def test_a_peak_over_the_limit_is_warned_of_though_somebody_asks_for_figures_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters())
    with warnings.catch_warnings(record=True) as told, Session(net, optimizer, frac=0.9, min_size=0) as session:
        warnings.simplefilter("always")
        peak = session.device.peak
        for step in range(8):
            if step == 6:
                monkeypatch.setattr(session.device, "peak", lambda: Peak(*(n + session.limit for n in peak())))
            loss_of(net).backward()
            optimizer.step()
            session.stats()
    assert session.over_limit > 0
    (one,) = [warning for warning in told if "more than the limit" in str(warning.message)]
    assert one.filename == __file__


def test_frac_is_a_share_of_the_capacity() -> None:
    with Session(frac=0.5) as session:
        assert session.stats()["limit"] == int(0.5 * session.device.capacity())
    with Session() as session:
        assert session.stats()["limit"] == int(0.9 * session.device.capacity())
        assert "limit" in session.describe()


def test_nothing_moves_when_everything_fits() -> None:
    net = model()
    with Session(net, min_size=0) as session:
        for _ in range(4):
            loss_of(net).backward()
        stats = session.stats()
    assert stats["passes"] == 4
    assert stats["swapped_out"] == stats["swapped_in"] == stats["file_peak"] == 0
    assert stats["saved"] > 0
    assert session.plan.moves == ()


# A tier that fails


def test_a_full_disk_in_the_middle_of_a_step_is_that_steps_error(
    lms: Make, live: Live, files_of_at_most: Callable[[int], contextlib.AbstractContextManager[None]]
) -> None:
    net = model()
    theirs = gradients(net)
    with lms() as session:
        assert identical(gradients(net), theirs)
        for _ in range(2):
            with files_of_at_most(8192), pytest.raises(SpillError, match=r"spill_dir=.*free"):
                gradients(net)
            assert live(session) == 0
            assert identical(gradients(net), theirs)
    assert session.engine.usage()["file"] == 0


@contextmanager
def no_more_files() -> Generator[None, None, None]:
    """What a script that has used up its open files leaves to LMS."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # the numbers below are taken: no file can be opened
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_session_trains_on_when_no_more_files_can_be_opened(lms: Make) -> None:
    net = model()
    theirs = gradients(net)
    with lms() as session:
        with no_more_files():
            for _ in range(6):
                assert identical(gradients(net), theirs)
        assert session.progress.passes == 6
        assert session.stats()["swapped_out"] > 0


def test_a_session_that_can_open_no_file_is_refused_with_what_to_do(lms: Make) -> None:
    with no_more_files(), pytest.raises(LMSError, match=r"Too many open files.*ulimit -n"), lms():
        pass


def test_a_flipped_byte_in_the_slab_is_found(lms: Make, live: Live) -> None:
    net = model()
    theirs = gradients(net)
    with lms(verify=True) as session:
        loss = loss_of(net)
        with open(f"/proc/self/fd/{session.engine.file.fileno()}", "r+b", buffering=0) as slab:
            size = os.fstat(slab.fileno()).st_size
            content = os.pread(slab.fileno(), size, 0)
            os.pwrite(slab.fileno(), bytes(byte ^ 1 for byte in content), 0)
            os.fsync(slab.fileno())
        with pytest.raises(CorruptionError, match="other than they were written"):
            gradients(net, loss)
        del loss
        assert live(session) == 0
        assert identical(gradients(net), theirs)


def test_the_slab_has_no_name_and_no_other_user_may_read_it(lms: Make, on_disk: Path) -> None:
    with lms(spill_dir=on_disk) as session:
        gradients(model())
        state = os.fstat(session.engine.file.fileno())
        assert state.st_nlink == 0
        assert state.st_mode & 0o777 == 0o600
        assert list(on_disk.iterdir()) == []


# What it says


def test_the_figures_of_a_session(lms: Make) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    told = []
    with Session(net, optimizer, budget=0, min_size=0, on_plan=told.append) as session:
        assert session.trace is None
        assert session.plan is None
        assert session.timeline is None
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(net).backward()
            optimizer.step()
        stats = session.stats()
        assert session.describe().endswith("0 B of saved bytes stay")
    assert stats["steps"] == stats["passes"] == 3
    assert stats["budget"] == 0
    assert stats["swapped_out"] == stats["swapped_in"] > 0
    assert stats["last_out"] <= stats["saved"]
    assert stats["file_peak"] > 0
    assert 0 < stats["hook_time"] < stats["last_seconds"] * 30
    assert stats["predicted_step_time"] > 0
    assert stats["step_time"] > 0
    assert len(told) == 1
    assert {record.module for record in session.trace.records} >= {"1", "3"}
    assert session.timeline.held


def test_a_session_without_an_optimizer_counts_the_first_that_steps(lms: Make) -> None:
    net = model()
    first, second = (torch.optim.SGD(net.parameters(), 0.01) for _ in range(2))
    with lms() as session:
        for _ in range(2):
            loss_of(net).backward()
            first.step()
            second.step()
        assert session.stats()["steps"] == 2
    loss_of(net).backward()
    first.step()
    assert session.stats()["steps"] == 2


def test_an_optimizer_that_is_made_later_is_the_one_that_counts(lms: Make) -> None:
    net, other = model(), model()
    with lms(net) as session:
        unrelated = torch.optim.SGD(other.parameters(), 0.01)
        unrelated.step()
        assert session.stats()["steps"] == 1, "none was given, so it is the first that steps"
        late = torch.optim.SGD(net.parameters(), 0.01)
        session.add_optimizer(late)
        session.add_optimizer([late, torch.optim.SGD(net.parameters(), 0.01)])
        for _ in range(2):
            loss_of(net).backward()
            late.step()
            unrelated.step()
        assert session.stats()["steps"] == 3
    late.step()
    assert session.stats()["steps"] == 3
    with pytest.raises(UsageError, match="closed"):
        session.add_optimizer(late)
    with pytest.raises(UsageError, match=r"optimizer: expected an? Optimizer"):
        lms().add_optimizer(net)  # type: ignore[arg-type]


def test_an_optimizer_can_be_added_before_the_session_opens(lms: Make) -> None:
    net = model()
    given, added = (torch.optim.SGD(net.parameters(), 0.01) for _ in range(2))
    session = lms(net, optimizer=given)
    session.add_optimizer(added)
    with session:
        gradients(net)
        added.step()
        given.step()
        added.step()
        assert session.stats()["steps"] == 2


@pytest.mark.alone
def test_the_time_from_step_to_step_is_known_with_how_much_of_it_was_computed(lms: Make) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with lms(net, optimizer=optimizer) as session:
        for _ in range(4):
            threading.Event().wait(0.2)  # for data
            loss_of(net).backward()
            optimizer.step()
        stats, trace = session.stats(), session.trace
    # LMS's own time is not in the cycle, but it is in the thread's processor time: 10 ms on a slow machine.
    assert trace.cycle - trace.busy >= 0.1
    assert 0 < trace.busy == stats["step_busy"]
    assert trace.cycle <= stats["step_time"] * 1.5
    assert trace.passes == 1.0
    assert stats["predicted_step_time"] >= trace.cycle


# Evaluations and pauses


@pytest.mark.parametrize("how", [torch.no_grad, torch.inference_mode, torch.enable_grad, "pause"])
def test_an_evaluation_between_steps_leaves_plans_and_figures_alone(how: object, lms: Make) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    def score() -> float:
        larger = torch.randn(256, 32)
        return sum(net(larger).square().mean().item() for _ in range(2))

    with lms(net, optimizer=optimizer) as session:
        for _ in range(5):
            with session.pause() if how == "pause" else how():  # type: ignore[operator]
                score()
            loss_of(net).backward()
            optimizer.step()
            optimizer.zero_grad()
        stats, trace, progress = session.stats(), session.trace, session.progress
    assert stats["steps"] == progress.trained == 5
    assert stats["passes"] == (15 if how is torch.enable_grad else 5)
    assert stats["replans"] == 0
    assert stats["saved"] == trace.saved == (3 * 64 * 32 + 64 * 8) * 4
    assert stats["last_out"] == stats["last_in"] == session.plan.forecast.out > 0


def test_a_link_that_becomes_slower_leads_to_a_new_plan_and_the_same_bits(
    lms: Make, tier: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift, "LASTS", 0.0)  # the passes are short, and the link's speed is the test's
    net = model()
    plain = gradients(net)
    told: list[str] = []
    with lms(on_plan=lambda plan: told.append(plan.drift)) as session:
        for _ in range(10):
            assert identical(gradients(net), plain)
        slower = tier.link().scaled(0.5)
        tier.link = lambda: slower
        for _ in range(500):
            assert identical(gradients(net), plain)
            # A busy machine's computation may drift first; that plan, too, takes the link as it is.
            if session.trace is not None and session.trace.link == slower.to_dict():
                break
        else:
            pytest.fail(f"no new plan in 500 passes: {told}")
        assert "as long" in told[-1]
        assert identical(gradients(net), plain)


def test_in_a_pause_nothing_is_recorded_and_nothing_moves(lms: Make) -> None:
    net, teacher = model(), model()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    theirs = gradients(teacher)
    with lms() as session:
        for _ in range(3):
            loss_of(net).backward()
            optimizer.step()
        before, plan = session.stats(), session.plan
        with session.pause(), session.pause():
            ours = gradients(teacher)
            torch.optim.SGD(teacher.parameters(), 0.01).step()
        after = session.stats()
        assert identical(ours, theirs)
        changing = {"peak", "hook_time", "step_busy"}
        assert {name: value for name, value in after.items() if name not in changing} == {
            name: value for name, value in before.items() if name not in changing
        }
        assert session.plan is plan
        gradients(net)
        assert session.stats()["passes"] == before["passes"] + 1, "it is over"


def test_what_was_saved_before_a_pause_is_used_inside_it_and_after(lms: Make) -> None:
    net = model()
    theirs = gradients(net)
    with lms() as session:
        for _ in range(3):
            loss = loss_of(net)
            with session.pause():
                with torch.no_grad():
                    loss_of(net)
                inside = gradients(net, loss)
            assert identical(inside, theirs)
            loss = loss_of(net)
            with session.pause():
                other = gradients(net)
            assert identical(other, theirs)
            assert identical(gradients(net, loss), theirs)
        stats = session.stats()
    assert stats["passes"] == 6
    assert stats["replans"] == 0, "each pass was like the first"
    assert stats["swapped_in"] > 0


@pytest.mark.parametrize("changed", [False, True])
def test_what_is_written_early_and_changed_before_it_leaves_is_an_error_as_in_plain_autograd(
    changed: bool, lms: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written_early(trace: Trace, *args: object, **options: object) -> Plan:
        """The records that two backwards read leave between them, and are written with their write."""
        plan = make_plan(trace, *args, **options)
        touches = {index: trace.touches[index] for index in range(len(trace.tensors)) if len(trace.touches[index]) == 3}
        assert touches
        early = [Swap(index, write, first, write, True) for index, (write, first, _) in touches.items()]
        late = [Swap(index, first, second, second, False) for index, (_, first, second) in touches.items()]
        cap = (trace.saved,) * len(trace.accesses)
        moves = sorted([*early, *late], key=lambda move: move.after)
        forecast = replace(plan.forecast, held_peak=trace.saved)
        return replace(plan, moves=tuple(moves), cap=cap, forecast=forecast)

    def written_at_once(mover: Mover, record: LiveRecord) -> Copy | None:
        copy = offload(mover, record)
        if copy is not None:
            copy.synchronize()  # else it may still be in flight when the tensor is to leave, and then it stays
        return copy

    def forward(x: Tensor, changed: bool) -> Tensor:
        y = x.sin().exp()  # saves its result
        total = (y * 2).sum()
        if changed:
            with torch.no_grad():
                y.add_(1)
        return total

    def twice(x: Tensor, changed: bool = False) -> list[Tensor]:
        loss = forward(x, changed)
        return [*torch.autograd.grad(loss, x, retain_graph=True), *torch.autograd.grad(loss, x)]

    x = torch.randn(50, 50, requires_grad=True)
    theirs = twice(x)
    make_plan, offload = plan_maker.make_plan, Mover.offload
    monkeypatch.setattr(plan_maker, "make_plan", written_early)
    monkeypatch.setattr(Mover, "offload", written_at_once)
    with lms() as session:
        for _ in range(2):
            assert identical(twice(x), theirs)
        before = session.stats()
        assert identical(twice(x), theirs)
        after = session.stats()
        for way in ("swapped_out", "swapped_in"):
            assert after[way] - before[way] == x.nbytes, "written once, and away between the two backwards"
        if changed:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                twice(x, changed=True)
        assert identical(twice(x), theirs)


def test_what_is_saved_in_a_pause_can_be_used_after_it(lms: Make, live: Live) -> None:
    net = model()
    theirs = gradients(net)
    with lms() as session:
        with session.pause():
            loss = loss_of(net)
        assert identical(gradients(net, loss), theirs)
        assert live(session) == 0
        with session.pause():
            x = torch.randn(4, requires_grad=True)
            y = x.exp()
            with torch.no_grad():
                y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_pause_ends_with_an_error_too(lms: Make) -> None:
    net = model()
    with lms() as session:
        with pytest.raises(KeyError), session.pause():
            raise KeyError
        gradients(net)
        assert session.stats()["passes"] == 1


def test_a_pause_is_for_an_open_session_and_its_own_thread(lms: Make) -> None:
    session = lms()
    errors: list[Exception] = []

    def pause() -> None:
        try:
            with session.pause():
                pass
        except UsageError as error:
            errors.append(error)

    pause()
    with session:
        in_thread(pause)
        with session.pause():
            disable()
        pause()
    assert ["thread" in str(error) for error in errors] == [False, True, False]


def test_memory_of_a_pause_counts_in_the_peak_and_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters())
    with warnings.catch_warnings(record=True) as told, Session(net, optimizer, frac=0.9, min_size=0) as session:
        warnings.simplefilter("always")
        peak, most = session.device.peak, 0
        monkeypatch.setattr(session.device, "peak", lambda: Peak(*(n + most for n in peak())))
        for _ in range(3):  # each in the first steps, in which the limit may end the training
            loss_of(net).backward()
            optimizer.step()
            with session.pause():
                most = session.limit
            most = 0
        assert session.stats()["peak"] > session.limit
        assert session.over_limit > 0
        assert "in a pause after pass" in session.peak_where
    assert ["in a pause after pass 3" in str(warning.message) for warning in told] == [True]


def test_models_and_optimizers_that_are_none_are_refused() -> None:
    with pytest.raises(UsageError, match="model: expected a Module"):
        Session("resnet")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"optimizer: expected an? Optimizer"):
        Session(None, [model()])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="'cpu' or 'cuda'"):
        Session(device="meta")


def test_an_option_without_effect_is_a_warning() -> None:
    with pytest.warns(RuntimeWarning, match="host_limit has no effect"), Session(budget=0, host_limit="1GB"):
        pass


# Several processes


def work(rank: int, port: int) -> None:
    """One of two ranks: the same steps with and without LMS, gradients compared bit for bit."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)

    def steps() -> list[Tensor]:
        net = nn.parallel.DistributedDataParallel(model())
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        shown = []
        for step in range(4):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            net(torch.randn(64, 32)).square().mean().backward()
            optimizer.step()
            shown += [p.grad.clone() for p in net.parameters()]
        return shown

    theirs = steps()
    with Session(budget=0, min_size=0) as session:
        ours = steps()
    assert session.stats()["swapped_out"] > 0
    assert identical(ours, theirs)
    torch.distributed.destroy_process_group()


def test_two_ranks_train_as_they_do_without_lms() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            status = 1
            try:
                work(rank, port)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
