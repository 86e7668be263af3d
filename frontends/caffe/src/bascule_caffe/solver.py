"""Caffe's solver: iterations, tests, log lines and snapshots, as a solver.prototxt asks for them."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from contextlib import nullcontext, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from google.protobuf.message import Message
from torch import Tensor

from bascule_caffe.data import Feed, Share
from bascule_caffe.errors import FileError, NetError, NoLayerError
from bascule_caffe.job import Job
from bascule_caffe.layer import require
from bascule_caffe.log import Log, described, numbers_of
from bascule_caffe.memory import Memory
from bascule_caffe.messages import NetParameter, NetState, format_text, parse_text
from bascule_caffe.net import Net
from bascule_caffe.optimizers import SOLVERS, CaffeOptimizer, Step
from bascule_caffe.schedule import Schedule
from bascule_caffe.signals import Action, Signals
from bascule_caffe.snapshot import Progress, load_model, load_state, save_model, save_state


class Solver:
    """A training that a solver.prototxt describes.

    `parameter` is a SolverParameter and `path` its file, which errors name. Raises NetError for what a solver or net
    cannot be, with its file and line, and FileError for files that are missing or damaged.
    """

    def __init__(
        self,
        parameter: Message,
        path: str = "solver",
        *,
        job: Job | None = None,
        device: torch.device | str = "cpu",
        log: Log | None = None,
        memory: Memory | None = None,
        level: int = 0,
        stages: tuple[str, ...] = (),
    ) -> None:
        self.parameter: Any = parameter
        self.path = path
        self.job = job or Job()
        self.log = log or Log(self.job.rank)
        self.memory = memory
        self.iteration = 0
        self._device = torch.device(device)
        self._level, self._stages = level, stages
        self.log.info("solver.cpp:45", f"Initializing solver from parameters: \n{format_text(parameter).rstrip()}")
        for field in ("debug_info", "layer_wise_reduce", "snapshot_diff"):
            if self.parameter.HasField(field):
                self.log.warn("solver.cpp:45", f"{field} has no effect here")
        for field, least in (("iter_size", 1), ("max_iter", 0), ("display", 0), ("snapshot", 0)):
            value = getattr(self.parameter, field)
            require(value >= least, f"{self._at(field)}: {field} is {value}, and must be at least {least}")
        self._prefix = self._snapshot_prefix()
        self.seed = self._agreed_seed()
        torch.manual_seed(self.seed)
        self._feed = Feed(Share(self.job.rank, self.job.size, self.seed))
        self.net = self._net(*self._train_net(), self._feed)
        self._test_feeds: list[Feed] = []
        self.test_nets = self._make_test_nets()
        self.job.broadcast(self.net.state_dict().values())
        self.optimizer = self._optimizer()
        self.schedule = self._schedule()
        self._losses: deque[Tensor] = deque(maxlen=max(1, self.parameter.average_loss))
        self._signals = Signals()
        self._stop = False

    # Public

    def load_weights(self, paths: str) -> None:
        """Take the blobs of the layers that models have, too; `paths` are separated by commas."""
        trained = {layer.name for layer in self.net.layers}
        own = [net for net in self.test_nets if any(layer.blobs and layer.name not in trained for layer in net.layers)]
        taken: list[str] = []
        for path in map(str.strip, paths.split(",")):
            self.log.info("caffe.cpp:155", f"Finetuning from {path}")
            taken += load_model(path, self.net)
            for net in own:  # the other test nets share every blob
                with suppress(NoLayerError):
                    load_model(path, net)
        if left := self.net.left_out(taken):
            self.log.info("caffe.cpp:155", f"Not in the model, and as their fillers made them: {left}")
        self.job.broadcast(self.net.state_dict().values())

    def restore(self, path: str) -> None:
        """Go on where the solver was that wrote this solverstate. Batches go on, too, where they were."""
        self.log.info("caffe.cpp:241", f"Resuming from {path}")
        progress = load_state(path, self.optimizer)
        if progress.model:
            beside = Path(path).parent / Path(progress.model).name  # of a folder that was moved
            model = progress.model if os.path.exists(progress.model) or not beside.exists() else str(beside)
            taken = load_model(model, self.net)
            if missing := self.net.left_out(taken):
                raise FileError(f"{model}: has no blobs of {missing}: it is the model of another net; see {path}")
        fallen = sum(value < progress.iteration for value in self.parameter.stepvalue)
        self.schedule.current_step = fallen if progress.current_step is None else progress.current_step
        self.iteration = progress.iteration
        self.job.broadcast([*self.net.state_dict().values(), *self.optimizer.histories()])
        self._seek()

    def solve(self, signals: Signals | None = None) -> None:
        """Train until max_iter, or until a signal asks to stop."""
        self.log.info("solver.cpp:289", f"Solving {self.net.name}")
        self.log.info("solver.cpp:290", f"Learning Rate Policy: {self.parameter.lr_policy}")
        self._signals = signals or Signals()
        with self.memory.swapping(self.net, self.optimizer) if self.memory is not None else nullcontext():
            self.step(self.parameter.max_iter - self.iteration)
            if self.memory is not None:
                self.log.info("lms", self.memory.session.describe())
        every = self.parameter.snapshot
        if self.parameter.snapshot_after_train and not (every and self.iteration % every == 0):
            self.snapshot()
        if self._stop:
            self.log.info("solver.cpp:295", "Optimization stopped early.")
            return
        if self._is_due(self.parameter.display):
            self._seed_for(0)
            with torch.no_grad():
                self.net()
            self._losses.append(self.net.loss)
            self.log.info("solver.cpp:327", f"Iteration {self.iteration}, loss = {self.loss:g}")
        if self._is_due(self.parameter.test_interval):
            self.test_all()
        self.log.info("solver.cpp:332", "Optimization Done.")

    def step(self, iterations: int) -> None:
        """Train for so many iterations, with the tests, log lines and snapshots that fall into them."""
        end, since, last = self.iteration + iterations, time.perf_counter(), self.iteration
        self._losses.clear()
        while self.iteration < end and not self._stop:
            due = self._is_due(self.parameter.test_interval)
            if due and (self.iteration > 0 or self.parameter.test_initialization) and not self.test_all():
                break
            outputs = self._forward_backward()
            display = self._is_due(self.parameter.display)
            if display:
                lapse = time.perf_counter() - since
                pace = f"{(self.iteration - last) / lapse:g} iter/s, {lapse:g}s/{self.parameter.display} iters"
                self.log.info("solver.cpp:218", f"Iteration {self.iteration} ({pace}), loss = {self.loss:g}")
                self._show(self.net, outputs, "Train", "solver.cpp:237")
                since, last = time.perf_counter(), self.iteration
            self._update(display)
            self.iteration += 1
            asked = self._asked()
            if self._is_due(self.parameter.snapshot) or asked == Action.SNAPSHOT:
                self.snapshot()
            self._stop = asked == Action.STOP

    def test_all(self) -> bool:
        """Run every test net, and log the means of its outputs. Returns False if a signal asked to stop meanwhile."""
        # Each rank has statistics of its own batches; Caffe tests with those of its first GPU.
        self.job.broadcast([entry.parameter for entry in self.net.learnable if entry.lr_mult == 0])
        return all(self._test(number, net) for number, net in enumerate(self.test_nets))

    def snapshot(self) -> None:
        """Write the model and the solver's state. Rank 0 writes."""
        if self.job.rank != 0:
            return
        hdf5 = self.parameter.snapshot_format == self.parameter.HDF5
        kind, ending = ("HDF5", ".h5") if hdf5 else ("binary proto", "")
        begin = f"{self._prefix}_iter_{self.iteration}"
        model, state = f"{begin}.caffemodel{ending}", f"{begin}.solverstate{ending}"
        self.log.info("solver.cpp:447", f"Snapshotting to {kind} file {model}")
        save_model(model, self.net)
        self.log.info("sgd_solver.cpp:273", f"Snapshotting solver state to {kind} file {state}")
        save_state(state, self.optimizer, Progress(self.iteration, self.schedule.current_step, model))

    def close(self) -> None:
        """End the threads that read data."""
        for net in (self.net, *self.test_nets):
            net.close()

    @property
    def loss(self) -> float:
        """The mean loss of the last `average_loss` iterations, of this rank."""
        return float(torch.stack(list(self._losses)).mean())

    # An iteration

    def _is_due(self, every: int) -> bool:
        return bool(every) and self.iteration % every == 0

    def _forward_backward(self) -> dict[str, Tensor]:
        self.optimizer.zero_grad()
        losses, outputs = [], {}
        for part in range(self.parameter.iter_size):
            for attempt in range(2):
                self._seed_for(part)
                try:
                    outputs = self.net()
                    break
                except MemoryError as error:  # a limit of LMS that is too low; it is raised before anything is computed
                    if attempt or self.memory is None or not self.memory.relax(error, self.log):
                        raise
                    self._feed.seek(self.iteration * self.parameter.iter_size + part)
            outputs = {name: output.detach() for name, output in outputs.items()}  # the graph ends with the backward
            if self.net.loss.requires_grad:
                self.net.loss.backward()
            losses.append(self.net.loss.detach())
        self._losses.append(torch.stack(losses).mean())
        return outputs

    def _update(self, display: bool) -> None:
        try:
            rate = self.schedule.rate(self.iteration)
        except ValueError as error:
            raise NetError(f"{self._at('lr_policy')}: {error}") from None
        if display:
            self.log.info("sgd_solver.cpp:105", f"Iteration {self.iteration}, lr = {rate:g}")
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        learnt = [entry.parameter for entry in self.net.learnable if entry.parameter.requires_grad]
        for parameter in learnt:
            if parameter.grad is None:  # 0, as in Caffe: decay and momentum act, and other ranks may have one
                parameter.grad = torch.zeros_like(parameter)
        self.job.average(parameter.grad for parameter in learnt if parameter.grad is not None)
        self.optimizer.step()

    def _asked(self) -> Action:
        return Action(self.job.most(self._signals.take()))

    def _seed_for(self, part: int) -> None:
        """Chance depends on seed, iteration and rank alone, so that a resumed training has the same."""
        number = (self.iteration * self.parameter.iter_size + part) * self.job.size + self.job.rank
        torch.manual_seed((self.seed * 0x9E3779B97F4A7C15 + number) % 2**63)

    def _seek(self) -> None:
        """Let the data layers go on as if the iterations so far had run in this process."""
        self._feed.seek(self.iteration * self.parameter.iter_size)
        every = self.parameter.test_interval
        if every:
            tests = -(-self.iteration // every) - (not self.parameter.test_initialization and self.iteration > 0)
            for feed, batches in zip(self._test_feeds, self.parameter.test_iter, strict=True):
                feed.seek(tests * batches // feed.share.size)

    # A test

    def _test(self, number: int, net: Net) -> bool:
        self.log.info("solver.cpp:347", f"Iteration {self.iteration}, Testing net (#{number})")
        sums: dict[str, Tensor] = {}
        loss = torch.zeros(())
        batches = self.parameter.test_iter[number] // self._test_feeds[number].share.size
        for _ in range(batches):
            asked = self._asked()
            if asked == Action.SNAPSHOT:
                self.snapshot()
            if asked == Action.STOP:
                self._stop = True
                self.log.info("solver.cpp:386", "Test interrupted.")
                return False
            with torch.no_grad():
                outputs = net()
            loss = loss + net.loss.cpu()
            for name, output in outputs.items():
                sums[name] = sums[name] + output if name in sums else output.clone()
        if not batches:  # test_iter is 0: Caffe prints no scores then
            return True
        means = {name: total / batches for name, total in sums.items()}
        loss /= batches
        self.job.average([loss, *means.values()])
        if self.parameter.test_compute_loss:
            self.log.info("solver.cpp:391", f"Test loss: {float(loss):g}")
        self._show(net, means, "Test", "solver.cpp:414")
        return True

    def _show(self, net: Net, outputs: dict[str, Tensor], kind: str, place: str) -> None:
        for number, (name, value) in enumerate(numbers_of(net, outputs)):
            self.log.info(place, f"    {kind} net output #{number}: {described(net, name, value)}")

    # Making it

    def _snapshot_prefix(self) -> str:
        """How the names of snapshots begin. Raises FileError now, and not when the training has ended."""
        prefix = str(self.parameter.snapshot_prefix or os.path.splitext(self.path)[0])
        if self.parameter.snapshot_prefix and os.path.isdir(prefix):
            prefix = os.path.join(prefix, Path(self.path).stem)
        folder = os.path.dirname(prefix) or "."
        written = self.job.rank == 0 and (self.parameter.snapshot or self.parameter.snapshot_after_train)
        if written and not os.access(folder, os.W_OK):
            raise FileError(f"{self._at('snapshot_prefix')}: the folder {folder} cannot be written: make it")
        return prefix

    def _agreed_seed(self) -> int:
        given = self.parameter.random_seed
        seed = torch.tensor(given if given >= 0 else int.from_bytes(os.urandom(4)))
        self.job.broadcast([seed])
        return int(seed)

    def _train_net(self) -> tuple[Message, str, str]:
        """The parameter, phase and name of the training net."""
        param = self.parameter
        names = ("train_net", "train_net_param", "net", "net_param")
        given = [name for name in names if param.HasField(name)]
        found = ", ".join(given) or "none"
        wanted = f"{', '.join(names[:-1])} and {names[-1]}"
        require(len(given) == 1, f"{self.path}: one of {wanted} says the net; found: {found}")
        return self._parsed(given[0]), "TRAIN", given[0]

    def _make_test_nets(self) -> list[Net]:
        param = self.parameter
        sources: list[Message] = [*param.test_net_param, *map(self._file, param.test_net)]
        count, states = len(param.test_iter), len(param.test_state)
        for name in ("net", "net_param"):
            if param.HasField(name) and count > len(sources):
                sources += [self._parsed(name)] * (count - len(sources))
        each = f"{self._at('test_iter')}: {count} of test_iter for {len(sources)} test nets: give one for each"
        require(len(sources) == count, each)
        require(min(param.test_iter, default=0) >= 0, f"{self._at('test_iter')}: test_iter is below 0")
        interval = not count or param.test_interval > 0
        require(interval, f"{self._at('test_iter')}: a test net needs a test_interval above 0")
        require(states in (0, count), f"{self._at('test_state')}: {states} of test_state for {count} test nets")
        nets = []
        for number, source in enumerate(sources):
            # Ranks share the batches of a test if they can do so evenly; else each runs all.
            even = param.test_iter[number] % self.job.size == 0
            self._test_feeds.append(Feed(self._feed.share if even else Share(seed=self.seed)))
            net = self._net(source, "TEST", f"test net {number}", self._test_feeds[-1], number)
            net.share(self.net)
            nets.append(net)
        return nets

    def _net(self, source: Any, phase: str, name: str, feed: Feed, number: int = 0) -> Net:
        """The state of a net is its own and the solver's. -level and -stage are the training net's, as in Caffe."""
        state = NetState()
        if phase == "TRAIN":
            state.CopyFrom(self.parameter.train_state)
            state.level = self._level or state.level
            state.stage.extend(self._stages)
        elif self.parameter.test_state:
            state.CopyFrom(self.parameter.test_state[number])
        self.log.info("solver.cpp:102", f"Creating {phase.lower()} net from {name}")
        return Net(source, phase, state.level, tuple(state.stage), data=feed).to(self._device)

    def _parsed(self, name: str) -> Message:
        value = getattr(self.parameter, name)
        return self._file(value) if isinstance(value, str) else value

    def _file(self, path: str) -> Message:
        if not os.path.exists(path):
            beside = Path(self.path).parent / path
            hint = f"; {beside} exists: names are relative to where caffe is started" if beside.exists() else ""
            raise FileError(f"{self.path}: the net {path} does not exist{hint}")
        return parse_text(path, NetParameter)

    def _optimizer(self) -> CaffeOptimizer:
        param = self.parameter
        kind, field = param.type, "type"
        if param.HasField("solver_type"):
            kind, field = list(SOLVERS)[param.solver_type], "solver_type"
        require(kind in SOLVERS, f"{self._at(field)}: type is {kind!r}: {', '.join(SOLVERS)} are allowed")
        moves = not param.momentum or kind not in ("AdaGrad", "RMSProp")  # as in Caffe
        require(moves, f"{self._at('momentum')}: {kind} has no momentum: leave it out")
        below = kind != "Adam" or max(param.momentum, param.momentum2) < 1
        require(below, f"{self._at('momentum')}: Adam needs a momentum and a momentum2 below 1")
        groups = [
            {"params": [entry.parameter], "lr_mult": entry.lr_mult, "decay_mult": entry.decay_mult}
            for entry in self.net.learnable
        ]
        require(groups, f"{self.path}: no layer of the training net has blobs, so there is nothing to train")
        options = {field.name: getattr(param, field.name) for field in fields(Step)}
        try:
            optimizer = SOLVERS[kind](groups, param.base_lr, **options)
        except ValueError as error:
            raise NetError(f"{self._at('regularization_type')}: {error}") from None
        optimizer.on_clip = self._say_clipped
        return optimizer

    def _say_clipped(self, norm: float, limit: float) -> None:
        how = f"(L2 norm {norm:g} > {limit:g}) by scale factor {limit / norm:g}"
        self.log.info("sgd_solver.cpp:95", f"Gradient clipping: scaling down gradients {how}")

    def _schedule(self) -> Schedule:
        param = self.parameter
        names = ("base_lr", "gamma", "power", "stepsize", "max_iter")
        options = {name: getattr(param, name) for name in names}
        try:
            return Schedule(param.lr_policy, stepvalue=tuple(param.stepvalue), **options)
        except ValueError as error:
            raise NetError(f"{self._at('lr_policy')}: {error}") from None

    def _at(self, field: str) -> str:
        """The file, and the line of a field in it, for an error."""
        try:
            lines = Path(self.path).read_text(encoding="utf-8-sig").splitlines()
        except OSError:
            return self.path
        number = next((i for i, line in enumerate(lines, 1) if re.match(rf"\s*{field}\s*:", line)), None)
        return self.path if number is None else f"{self.path}:{number}"
