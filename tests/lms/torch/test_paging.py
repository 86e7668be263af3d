"""Parameters, gradients and optimizer state that are away between their uses: plain's bits, at addresses that stay."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lms.errors import SpillError
from lms.torch.cpu import page_pool
from lms.torch.session import Session

pytestmark = pytest.mark.skipif(page_pool.find() is None, reason="no page pool: python -m lms.build torch")

ALL = "activations,optimizer,parameters,gradients"
WIDTH = 160  # a weight of 102 KB, above what the pool takes
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "adam-loop": lambda p: torch.optim.Adam(p, 1e-2, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=4),
}


@pytest.fixture(autouse=True)
def _alone() -> None:
    """The pager is one for the process: models of earlier tests, if they still lived, would be in its figures."""
    gc.collect()


class Net(nn.Module):
    """More weights than the pager keeps at least; the first and the last are one."""

    def __init__(self, layers: int = 14) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, WIDTH) / WIDTH)
        self.up = nn.Parameter(torch.zeros(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + functional.linear(functional.linear(x, self.down), self.up)


def clipped(model: nn.Module, _optimizer: Optimizer, _step: int) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def saved(model: nn.Module, optimizer: Optimizer, _step: int) -> object:
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    twin = copy.deepcopy(model)
    model.load_state_dict(twin.state_dict())
    buffer.seek(0)
    read = torch.load(buffer)["model"]
    return [*read.values(), *twin.parameters()]


def doubled(model: nn.Module, _optimizer: Optimizer, step: int) -> object:
    if step == 3:
        model.double().float()
        model.layers[2].weight = nn.Parameter(model.layers[2].weight.detach() * 2)
    return None


def rounded(model: nn.Module, _optimizer: Optimizer, step: int) -> object:
    if step == 3:
        model.to(torch.bfloat16).to(torch.float32)  # other memory for each parameter
    return None


Between = Callable[[nn.Module, Optimizer, int], object]


def train(
    make: Callable[[Iterable[Tensor]], Optimizer] = OPTIMIZERS["adamw"],
    *,
    steps: int = 6,
    accumulated: int = 1,
    to_none: bool = True,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    forward: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
    between: Between | None = None,
    **options: Any,
) -> tuple[list[Any], Session | None]:
    """Losses, what `between` returned between backward and step, and parameters; under a session with `options`."""
    torch.manual_seed(3)
    model = wrap(Net())
    optimizer = make([one for one in model.parameters() if one.requires_grad])
    session = Session(model, optimizer, **({"budget": 0} | options)) if options else None
    found: list[Any] = []

    def loss_of(index: int) -> Tensor:
        optimizer.zero_grad(set_to_none=to_none)
        for part in range(accumulated):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2 * index + part))
            loss: Tensor = forward(model, x).square().mean()
            loss.backward()
        return loss

    with session or torch.enable_grad():
        for index in range(steps):
            if isinstance(optimizer, torch.optim.LBFGS):
                found.append(optimizer.step(lambda index=index: loss_of(index)))
                continue
            found.append(loss_of(index))
            if between is not None:
                found.append(between(model, optimizer, index))
            optimizer.step()
    return [found, [one.detach().clone() for one in model.parameters()]], session


def flat(value: Any) -> Iterator[Tensor]:
    for one in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(one, (list, tuple)):
            yield from flat(one)
        elif one is not None:
            yield torch.as_tensor(one).detach()


def same(one: Any, other: Any) -> bool:
    mine, theirs = list(flat(one)), list(flat(other))
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def check(swap: str, **given: Any) -> dict[str, Any]:
    """Train with and without, compare, and return the session's figures."""
    plain, _ = train(**given)
    ours, session = train(**given, swap=swap)
    assert session is not None
    assert same(plain, ours)
    figures = session.stats()
    assert figures["state_in"]
    return figures


@pytest.mark.parametrize(
    ("name", "swap"),
    [
        pytest.param(name, swap, marks=[] if swap == ALL else pytest.mark.slow)
        for name in OPTIMIZERS
        for swap in ("parameters", "optimizer", "parameters,gradients", ALL)
        if (name, swap) != ("adafactor", "optimizer")  # a row and a column of each weight are too small to leave
    ],
)
def test_each_optimizer_trains_with_plains_bits(name: str, swap: str) -> None:
    check(swap, make=OPTIMIZERS[name])


@pytest.mark.parametrize(
    "given",
    [
        {"between": clipped},
        {"accumulated": 2},
        {"to_none": False},
        {"between": saved},
        {"between": rounded},
        {"between": doubled},
        {"forward": lambda model, x: checkpoint(model, x, use_reentrant=False)},
    ],
    ids=["clipped", "accumulated", "zeroed", "saved", "cast", "replaced", "checkpointed"],
)
def test_what_scripts_do_keeps_plains_bits(given: dict[str, Any]) -> None:
    check(ALL, **given)


def test_gradients_alone_leave() -> None:
    plain, _ = train(between=clipped)
    ours, session = train(between=clipped, swap="gradients")
    assert session is not None
    assert same(plain, ours)
    assert session.stats()["state_out"]


def test_gradients_that_are_saved_for_gradients_of_theirs_leave_twice(one_thread: None) -> None:
    def of_norms(**options: Any) -> list[Tensor]:
        torch.manual_seed(3)
        model, found = Net(), []
        with Session(model, budget=0, **options) if options else torch.enable_grad():
            for _ in range(2):
                model(torch.ones(2, WIDTH)).square().mean().backward(create_graph=True)
                gradients = [one.grad for one in model.parameters()]
                penalty = torch.stack([one.square().sum() * one.abs().sum() for one in gradients]).sum()
                model.zero_grad()
                penalty.backward()
                found += [penalty.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
        return found

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward.. with create_graph=True")
        assert same(of_norms(swap="activations,gradients"), of_norms())


def test_an_average_of_the_parameters_follows_them() -> None:
    def averaged() -> Between:
        shadow: list[Tensor] = []

        def update(model: nn.Module, _optimizer: Optimizer, _step: int) -> object:
            with torch.no_grad():
                for index, one in enumerate(model.parameters()):
                    if len(shadow) <= index:
                        shadow.append(one.detach().clone())
                    shadow[index].lerp_(one, 0.1)
            return [one.clone() for one in shadow]

        return update

    plain, _ = train(between=averaged())
    ours, _ = train(between=averaged(), swap=ALL)
    assert same(plain, ours)


def test_a_frozen_base_is_written_once_and_then_dropped() -> None:
    def adapted(model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        layers = model.layers
        for index, layer in enumerate(layers):
            layers[index] = Adapted(layer)
        return model

    figures = check("parameters", wrap=adapted, steps=8)
    assert figures["state_out"] <= figures["state"]
    assert figures["state_in"] > figures["state_out"]


def test_an_optimizers_state_from_before_the_session_leaves_too() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with Session(model, optimizer, budget=0, swap="optimizer") as session:
        for _ in range(3):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
        figures = session.stats()
    assert figures["state"] >= 2 * 13 * WIDTH * WIDTH * 4  # the two moments of each weight
    assert figures["state_in"]


def test_a_model_that_was_not_given_is_known_after_its_first_forward() -> None:
    model = Net()
    with Session(budget=0, swap="parameters") as session:
        model(torch.ones(2, WIDTH))
        assert session.stats()["state"] == 13 * WIDTH * WIDTH * 4


def test_a_lazy_module_is_known_after_its_first_forward() -> None:
    model = nn.Sequential(nn.LazyLinear(WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(12)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Session(model, optimizer, budget=0, swap="parameters,gradients") as session:
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
        assert session.stats()["state"] == 2 * 13 * WIDTH * WIDTH * 4


def test_what_is_away_comes_back_although_a_script_sets_the_signals_handler_back() -> None:
    former = signal.getsignal(signal.SIGSEGV)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Session(model, optimizer, budget=0, swap="parameters"):
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
    signal.signal(signal.SIGSEGV, signal.SIG_DFL if former is None else former)
    assert all(one.isfinite().all() for one in model.parameters())


def test_an_optimizer_of_another_keeps_what_it_likes_in_its_state() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index, call-overload]
            return super().step(closure)

    def counted(_model: nn.Module, optimizer: Optimizer, _step: int) -> object:
        return torch.tensor(optimizer.state.get("steps", 0))  # type: ignore[call-overload]

    check("optimizer", make=lambda p: Counting(p, 0.01, momentum=0.9), between=counted)


def spill_files() -> int:
    """How many files without a name this process has open."""
    found = set()
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "(deleted)" in os.readlink(one):
                found.add(one.stat().st_ino)
    return len(found)


def test_the_file_is_closed_with_the_last_tensor_in_it() -> None:
    before = spill_files()
    model = Net()
    with Session(model, budget=0, swap="parameters"):
        model(torch.ones(2, WIDTH))
        assert spill_files() == before + 1
    left = model.layers[3].weight.detach()
    assert spill_files() == before + 1
    del model
    gc.collect()
    assert spill_files() == before + 1
    assert left.isfinite().all()
    del left
    assert spill_files() == before


def test_one_model_after_another_takes_the_same_room_in_the_file() -> None:
    taken = []
    with Session(budget=0, swap="optimizer,parameters,gradients") as session:
        for _ in range(3):
            model = Net()
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            for _ in range(2):
                model(torch.ones(2, WIDTH)).sum().backward()
                optimizer.step()
            del model, optimizer
            gc.collect()
            taken.append(session.engine.usage()["file"])
    assert taken[0] == taken[1] == taken[2] > 0


plain_save = torch.save  # what `from torch import save` gives a script before any session


@pytest.mark.parametrize("how", ["zipped", "not zipped", "TorchScript"])
@pytest.mark.parametrize("after_session", [False, True])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_is_away_is_saved_to_a_file(tmp_path: Path, how: str, after_session: bool) -> None:
    torch.manual_seed(0)
    model = Net(20)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    saved = tmp_path / "saved.pt"

    def save() -> None:
        if how == "TorchScript":
            torch.jit.script(model.layers).save(saved)
        else:
            plain_save(model.layers.state_dict(), saved, _use_new_zipfile_serialization=how == "zipped")

    with Session(model, optimizer, budget=0, swap="optimizer,parameters") as session:
        for _ in range(3):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
        if not after_session:
            save()
        assert session.stats()["state_out"] > 0
    if after_session:
        save()
    read = torch.jit.load(saved).state_dict() if how == "TorchScript" else torch.load(saved)
    assert all(torch.equal(read[name], one) for name, one in model.layers.state_dict().items())


def test_system_calls_read_what_is_away_while_pieces_leave_and_come_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net(20)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stop = threading.Event()

    def use() -> None:
        while not stop.is_set():
            for one in weights:
                one.sum()

    session = Session(model, optimizer, budget=0, swap="parameters")
    with session, open(tmp_path / "written", "w+b", buffering=0) as file:
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
        weights = [one.detach().numpy() for one in model.parameters()]
        expected = b"".join(one.tobytes() for one in weights)
        with pytest.raises(OSError, match="Bad address"):
            file.writelines(weights)  # type: ignore[arg-type]  # arrays are buffers, too
        thread = threading.Thread(target=use)
        thread.start()
        try:
            with session._state._paging.pager.reading():
                for _ in range(20):
                    file.seek(0)
                    assert os.writev(file.fileno(), weights) == len(expected)
                    assert os.pread(file.fileno(), len(expected), 0) == expected
        finally:
            stop.set()
            thread.join()


def test_addresses_stay() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Session(model, optimizer, budget=0, swap="parameters") as session:
        view = model.layers[3].weight.detach()[1:3, ::2]
        array, address = model.layers[4].weight.detach().numpy(), model.layers[4].weight.data_ptr()
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
        assert session.stats()["state_in"]
        assert torch.equal(view, model.layers[3].weight[1:3, ::2])
        assert model.layers[4].weight.data_ptr() == address
        assert np.array_equal(array, model.layers[4].weight.detach().numpy())


@pytest.mark.parametrize("when", ["before the session", "in the session"])
def test_parameters_that_are_mapped_from_a_file_leave_and_the_file_stays_as_it_is(tmp_path: Path, when: str) -> None:
    file = tmp_path / "weights.pt"
    torch.save(Net().state_dict(), file)
    before = file.read_bytes()

    def load() -> Net:
        model = Net()
        model.load_state_dict(torch.load(file, mmap=True), assign=True)
        model.layers[-1].weight = model.layers[0].weight
        return model

    def train(session: contextlib.AbstractContextManager[Any]) -> tuple[list[Tensor], Any]:
        model = load()
        with session as opened:
            if when == "in the session":
                model = load()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(3):
                model(torch.ones(2, WIDTH)).square().sum().backward()
                optimizer.step()
            return [*model.parameters()], opened and opened.stats()

    plain, _ = train(contextlib.nullcontext())
    found, stats = train(Session(budget=0, swap="parameters"))
    assert same(found, plain)
    assert stats["state"] == sum(one.nbytes for one in found if one.nbytes >= 1 << 16)
    assert stats["state_in"] > 0
    assert file.read_bytes() == before


def test_memory_that_several_slices_of_a_file_have_keeps_what_was_written_to_it(tmp_path: Path) -> None:
    nbytes = 4 * WIDTH * WIDTH
    (tmp_path / "weights").write_bytes(bytes(nbytes))
    whole = torch.UntypedStorage.from_file(str(tmp_path / "weights"), False, nbytes)
    one, other = (torch.empty(0).set_(whole[:nbytes]).view(WIDTH, WIDTH) for _ in range(2))  # type: ignore[call-overload]
    other.fill_(7)
    model = Net()
    model.layers[5].weight = nn.Parameter(one)
    del one
    with Session(model, budget=0, swap="parameters") as session:
        model(torch.ones(2, WIDTH))
        assert session.stats()["state"] == 13 * nbytes
        assert (model.layers[5].weight == 7).all()
        assert (other == 7).all()


def test_sparse_state_stays() -> None:
    def train(session: contextlib.AbstractContextManager[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Embedding(1000, 100, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        with session:
            for step in range(3):
                optimizer.zero_grad()
                model(torch.arange(step, 400 + step)).square().sum().backward()
                optimizer.step()
        return [*model.parameters()]

    assert same(train(Session(budget=0, swap="optimizer")), train(contextlib.nullcontext()))


@pytest.mark.parametrize("how", ["read", "mapped", "read, with an array", "read, with DLPack's array", "from an array"])
def test_state_that_was_loaded_before_the_session_leaves_unless_others_have_it(tmp_path: Path, how: str) -> None:
    file = tmp_path / "state.pt"

    def train(session: Callable[..., contextlib.AbstractContextManager[Any]], steps: int) -> Any:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        arrays = []
        if file.exists():
            optimizer.load_state_dict(torch.load(file, mmap=how == "mapped"))
            for entry in optimizer.state.values():
                if how == "from an array":
                    arrays.append(entry["momentum_buffer"].numpy().copy())
                    entry["momentum_buffer"] = torch.from_numpy(arrays[-1])
                elif how == "read, with an array":
                    arrays.append(entry["momentum_buffer"].numpy())
                elif how == "read, with DLPack's array":
                    arrays.append(np.from_dlpack(entry["momentum_buffer"]))
        with session(model, optimizer) as opened:
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.ones(2, WIDTH)).square().sum().backward()
                optimizer.step()
            stats = opened and opened.stats()
        buffers = [entry["momentum_buffer"] for entry in optimizer.state.values()]
        assert all(np.array_equal(array, one) for array, one in zip(arrays, buffers, strict=False))
        if not file.exists():
            torch.save(optimizer.state_dict(), file)
        return [*model.parameters(), *buffers], stats

    def plain(*_: object) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    train(plain, 2)
    expected, _ = train(plain, 3)
    found, stats = train(lambda *args: Session(*args, budget=0, swap="optimizer"), 3)
    assert same(found, expected)
    large = sum(one.nbytes for one in found[len(found) // 2 :] if one.nbytes >= 1 << 16)
    assert stats["state"] == (0 if "array" in how else large)


@pytest.mark.parametrize("how", ["a view", "numpy", "from numpy", "DLPack", "shared"])
def test_memory_that_others_refer_to_stays(how: str) -> None:
    model = Net()
    weight = model.layers[5].weight
    if how == "a view":
        array = weight.detach().numpy()
    elif how == "numpy":
        array = weight.requires_grad_(False).numpy()
    elif how == "DLPack":
        array = np.from_dlpack(weight.requires_grad_(False))
    elif how == "from numpy":
        array = np.ones((WIDTH, WIDTH), np.float32)
        model.layers[5].weight = nn.Parameter(torch.from_numpy(array))
    else:
        model.share_memory()
        address = weight.data_ptr()
        with Session(model, budget=0, swap="parameters"):
            model(torch.ones(2, WIDTH))
        assert weight.data_ptr() == address
        assert weight.is_shared()
        return
    before = array.copy()
    with Session(model, budget=0, swap="parameters"):
        model(torch.ones(2, WIDTH))
        with torch.no_grad():
            model.layers[5].weight.zero_()
        assert not array.any()
        assert before.any()


def test_a_second_session_goes_on_and_after_it_all_is_there() -> None:
    def twice(sessions: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(2):
            with Session(model, optimizer, budget=0, swap=ALL) if sessions else torch.enable_grad():
                for _ in range(3):
                    optimizer.zero_grad()
                    model(torch.ones(2, WIDTH)).square().sum().backward()
                    optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH)).square().sum().backward()
        optimizer.step()
        return [*model.parameters()]

    assert same(twice(True), twice(False))


FORK = """
import os, sys, signal, torch, lms
from torch import nn
model = nn.Sequential(*[nn.Linear(200, 200) for _ in range(20)])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
session = lms.enable(model, optimizer, budget=0, swap="parameters")
for _ in range(3):
    model(torch.ones(2, 200)).sum().backward()
    optimizer.step()
pid = os.fork()
if pid == 0:
    for one in model.parameters():
        one.sum()
    os._exit(0)
_, status = os.waitpid(pid, 0)
print(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV)
print(all(one.isfinite().all() for one in model.parameters()))
"""


def test_a_forked_process_that_uses_what_is_away_ends_with_a_reason() -> None:
    run = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120)
    assert run.stdout.split() == ["True", "True"], run.stderr
    assert "a forked process uses memory that its parent has swapped out" in run.stderr


def test_a_process_forked_during_a_save_does_not_read_what_its_parent_goes_on_writing() -> None:
    program = FORK.replace("pid = os", "session._state._paging.pager.reading().__enter__()\npid = os")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.stdout.split() == ["True", "True"], run.stderr


def test_what_is_away_comes_back_although_faulthandler_is_enabled_meanwhile() -> None:
    enabled = (
        "import faulthandler; faulthandler.enable(); print(sum(one.sum() for one in model.parameters()).isfinite())"
    )
    disabled = enabled.replace("enable()", "disable()")
    for program in (f"{enabled}\n{disabled}", f"session.close()\n{enabled}"):
        run = subprocess.run(
            [sys.executable, "-c", FORK.replace("pid = os.fork()", f"{program}\nsys.exit()")],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert set(run.stdout.split()) == {"tensor(True)"}, run.stdout
        assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("before", ["enable()", "enable(); faulthandler.disable()", "disable()"])
def test_a_real_segmentation_fault_ends_the_process(before: str) -> None:
    fault = f"import ctypes, faulthandler; faulthandler.{before}; ctypes.string_at(16)"
    program = FORK.replace("pid = os.fork()", fault)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.returncode == -11, run.stderr


def test_a_full_disk_is_an_error_behind_the_step_and_loses_nothing(files_of_at_most: Any) -> None:
    plain, _ = train(OPTIMIZERS["sgd"], steps=3)
    torch.manual_seed(3)
    model = Net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())

    def step(index: int) -> None:
        optimizer.zero_grad()
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2 * index))
        model(x).square().mean().backward()
        optimizer.step()

    with Session(model, optimizer, budget=0, swap="parameters"):
        step(0)
        with files_of_at_most(8 << 10), pytest.raises(SpillError, match="writing failed: File too large"):
            step(1)
        with contextlib.suppress(SpillError):  # of a copy that failed after the other error
            step(2)
    assert same(plain[1], list(model.parameters()))


@pytest.mark.parametrize("idle", [0, 64 << 20])  # with much idle memory the pages are not moved away for the copy
def test_memory_that_a_full_disk_refused_is_as_good_as_any_once_it_is_freed(idle: int, files_of_at_most: Any) -> None:
    with Session(budget=0, swap="parameters") as session:
        paging = session._state._paging
        assert paging is not None
        ours = [torch.ones(1_000_000) for _ in range(40)]
        torch.ones(idle // 4)  # freed at once
        with files_of_at_most(8 << 10):
            for one in ours:
                assert paging.pager.track(paging.pager.block(one.nbytes), one.data_ptr())
            paging.pager.keep(0)
            deadline = time.monotonic() + 20
            while not paging.pager.usage().failed:
                assert time.monotonic() < deadline
        assert all(int(one.sum()) == one.numel() for one in ours)
        ours.clear()
        others = [torch.full((1_000_000,), 2.0) for _ in range(40)]
        assert all(int(one.sum()) == 2_000_000 for one in others)
        with pytest.raises(SpillError, match="writing failed"):
            paging.pager.check()


def test_a_model_is_built_under_the_limit() -> None:
    with torch.device("meta"):
        model = Net(40)
    model.to_empty(device="cpu")
    with Session(model, budget=0, swap="parameters") as session:
        for index, layer in enumerate(model.layers):
            nn.init.constant_(layer.weight, index)
        deadline = time.monotonic() + 60  # what has to leave is written beside the computation
        while (figures := session.stats())["state_held"] > figures["state"] // 2:  # type: ignore[operator]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for index, layer in enumerate(model.layers[1:-1], 1):
            assert torch.equal(layer.weight, torch.full((WIDTH, WIDTH), float(index)))


def test_the_first_pass_leaves_room_for_the_gradients_to_come() -> None:
    model = Net(6)
    with Session(frac=0.5, swap="parameters,gradients") as session:
        loss = model(torch.ones(2, WIDTH)).sum()
        weights = sum(layer.weight.nbytes for layer in model.layers[1:])  # two of them are one
        assert session.device.reserved == 2 * weights
        loss.backward()


def test_threads_read_and_write_what_comes_and_goes() -> None:
    pool = page_pool.find()
    assert pool is not None
    with Session(budget=0, swap="parameters") as session:
        paging = session._state._paging
        assert paging is not None
        draw = random.Random(1)
        ours = [torch.randn(draw.choice([20_000, 100_000, 3_000_000])) for _ in range(30)]
        theirs = [one.numpy().copy() for one in ours]
        blocks = [paging.pager.block(one.nbytes) for one in ours]
        for one, block in zip(ours, blocks, strict=True):
            assert paging.pager.track(block, one.data_ptr())
        paging.pager.expect([[block] for block in blocks])
        paging.pager.keep(40 << 20)
        over = threading.Event()

        def read() -> None:
            while not over.is_set():
                for one in ours:
                    one.sum()

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for turn in range(300):
                at = turn % 30 if draw.random() < 0.7 else draw.randrange(30)
                paging.pager.reach(turn % 30)
                if draw.random() < 0.5:
                    ours[at].add_(1)
                    theirs[at] += 1
                else:
                    assert np.array_equal(ours[at].numpy(), theirs[at])
        finally:
            over.set()
            reader.join()
        usage = paging.pager.usage()
        assert usage.out
        assert usage.back
        assert usage.resident < usage.tracked
        assert all(np.array_equal(one.numpy(), other) for one, other in zip(ours, theirs, strict=True))


def test_what_comes_back_takes_the_pages_of_what_has_left() -> None:
    with Session(budget=0, swap="parameters") as session:
        paging = session._state._paging
        assert paging is not None
        ours = [torch.full((1_000_000,), float(index)) for index in range(20)]
        blocks = [paging.pager.block(one.nbytes) for one in ours]
        for one, block in zip(ours, blocks, strict=True):
            assert paging.pager.track(block, one.data_ptr())
        paging.pager.expect([[block] for block in blocks])
        paging.pager.keep(40 << 20)
        before, faults = paging.pager.usage(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            for index, one in enumerate(ours):
                paging.pager.reach(index)
                assert one.min() == one.max() == index
        back = paging.pager.usage().back - before.back
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    assert back > sum(one.nbytes for one in ours)
    assert faults * resource.getpagesize() < back / 2  # the system gives out new pages one fault each


def test_the_pages_of_freed_gradients_are_handed_out_again() -> None:
    with Session(budget=0, swap="parameters") as session:
        paging = session._state._paging
        assert paging is not None
        paging.pager.keep(1 << 30)
        block = paging.pager.block(4_000_000, transient=True)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for index in range(20):
            one = torch.full((1_000_000,), float(index))
            assert paging.pager.track(block, one.data_ptr())
            assert one.min() == one.max() == index
            del one
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    assert faults * resource.getpagesize() < 20 * 4_000_000 / 2  # the system gives out new pages one fault each


def test_without_the_page_pool_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_pool, "find", lambda: None)
    with pytest.raises(Exception, match=r"lms\.build torch"), Session(budget=0, swap="parameters"):
        pass
