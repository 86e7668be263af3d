"""Random short trainings: a seed decides model, optimizer, and what the script does between its steps.

As a program: `random_trainings.py FIRST COUNT [NATIVE]` trains with COUNT seeds from FIRST on, each plain and with
state that is paged. If they differ, it names the seed and ends with 1. NATIVE is a folder of C++ sources that LMS uses
instead of its own.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import io
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lms.torch.session import Session, disable

WIDTH = 160  # a weight of 102 KB, above what the page pool takes
KINDS = ("activations", "optimizer", "parameters", "gradients")


def digest(tensor: Tensor) -> object:
    """What makes two tensors identical, in short."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    content = hashlib.sha1(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return str(tensor.dtype), tuple(tensor.shape), content.hexdigest()


def facts(value: Any) -> Iterator[object]:
    """All that a checkpoint has in it, comparable."""
    if isinstance(value, Tensor):
        yield digest(value)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield "parameter" if isinstance(key, Tensor) else key
            yield from facts(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from facts(one)
    else:
        yield value


def make_optimizer(rng: random.Random, parameters: list[Tensor]) -> Optimizer:
    """Any of PyTorch's that moves state, in any of its ways, over one group of parameters or two."""
    how = rng.choice(({}, {"foreach": False}, {"foreach": True}))
    fused = rng.choice((how, {"fused": True}))
    at = rng.randrange(1, len(parameters))
    groups: list[Any] = [{"params": parameters[:at]}, {"params": parameters[at:], "lr": 3e-3, "weight_decay": 0.01}]
    some: list[Any] = rng.choice((parameters, parameters, groups))
    makers: list[Callable[[], Optimizer]] = [
        lambda: torch.optim.SGD(some, 0.01, momentum=0.9, nesterov=rng.random() < 0.5, **how),
        lambda: torch.optim.Adam(some, 1e-2, amsgrad=rng.random() < 0.5, **fused),
        lambda: torch.optim.AdamW(some, 1e-2, maximize=rng.random() < 0.2, **fused),
        lambda: torch.optim.Adagrad(some, 1e-2, **how),
        lambda: torch.optim.RMSprop(some, 1e-3, momentum=0.9, centered=True, **how),
        lambda: torch.optim.NAdam(some, 1e-2, **how),
        lambda: torch.optim.RAdam(some, 1e-2, **how),
        lambda: torch.optim.Adadelta(some, 1e-1, **how),
        lambda: torch.optim.Adafactor(some, 1e-2),
        lambda: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, history_size=3),
    ]
    return rng.choice(makers)()


class Net(nn.Module):
    """Layers of equal width; some frozen, some recomputed in the backward, two of them perhaps with one weight."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(rng.randint(6, 16)))
        if rng.random() < 0.4:
            self.layers[-1].weight = self.layers[0].weight
        for layer in self.layers[1:]:
            layer.requires_grad_(rng.random() < 0.85)
        self.norm = nn.LayerNorm(WIDTH)
        self.table = nn.Embedding(14_000, WIDTH) if rng.random() < 0.2 else None  # more than the pager moves at once
        self.recomputed = rng.choice((0, 0, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.table is not None:
            x = x + self.table(torch.arange(0, 14_000, 14_000 // len(x))[: len(x)])
        for index, layer in enumerate(self.layers):
            if self.recomputed and index % self.recomputed == 1:
                x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=False)
            else:
                x = functional.dropout(torch.tanh(layer(x)), 0.1)
        return self.norm(x)


class Training:
    """A training that a seed decides; the same seed does the same, with a session and without."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        torch.manual_seed(seed)
        self.model = Net(rng)
        self.trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = make_optimizer(rng, self.trained)
        self.average = [one.detach().clone() for one in self.trained] if rng.random() < 0.3 else []
        self.to_none = rng.random() < 0.7
        self.accumulated = rng.choice((1, 1, 2))
        self.found: list[object] = []

    def run(self, steps: int, around: Callable[[Training], None] = lambda _: None) -> list[object]:
        """All that can be seen of it. `around` is called before each step."""
        for _ in range(steps):
            around(self)
            self.optimizer.zero_grad(set_to_none=self.to_none)
            try:
                self._step()
            except (Exception, KeyboardInterrupt) as error:  # its own, or PyTorch's about what its own has left
                self.found.append(type(error).__name__)
            self._between()
        self.found += facts([list(self.model.parameters()), self.optimizer.state_dict(), self.average])
        return self.found

    def _step(self) -> None:
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.found.append(digest(self.optimizer.step(self._closure)))
            return
        self._closure(zero=False)
        if self.rng.random() < 0.3:
            self.found.append(digest(nn.utils.clip_grad_norm_(self.trained, 0.1)))
        if self.rng.random() < 0.2:
            self.trained[self.rng.randrange(len(self.trained))].grad = None
        self.optimizer.step()

    def _closure(self, zero: bool = True) -> Tensor:
        if zero:
            self.optimizer.zero_grad(set_to_none=self.to_none)
        for _ in range(self.accumulated):
            loss = self.model(torch.randn(8, WIDTH)).square().mean()
            roll = self.rng.random()
            if roll < 0.05:
                raise ValueError("behind the forward")
            if roll < 0.1:
                self.trained[0].register_hook(self._fail_once())
            loss.backward()
        self.found.append(digest(loss))
        return loss

    def _fail_once(self) -> Callable[[Tensor], None]:
        left = [KeyboardInterrupt]

        def hook(_: Tensor) -> None:
            if left:
                raise left.pop()

        return hook

    def _between(self) -> None:
        """What scripts do between two steps."""
        rng, model, optimizer = self.rng, self.model, self.optimizer
        with torch.no_grad():
            for mean, one in zip(self.average, self.trained, strict=False):
                mean.lerp_(one, 0.1)
        roll = rng.random()
        if roll < 0.1:
            buffer = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
            buffer.seek(0)
            read = torch.load(buffer, weights_only=False)
            self.found += facts(read)
            model.load_state_dict(read["model"])
            optimizer.load_state_dict(read["optimizer"])
        elif roll < 0.2:
            twin = copy.deepcopy(model)
            self.found += facts(list(twin.parameters()))
            model.load_state_dict(twin.state_dict())
        elif roll < 0.3:
            with torch.no_grad():
                for one in self.trained:
                    one.mul_(0.999)
                self.found.append(digest(model(torch.ones(2, WIDTH))))
        elif roll < 0.4:
            self.found += facts({key: dict(entry) for key, entry in optimizer.state.items()})
        elif roll < 0.45:
            model.to(torch.bfloat16).to(torch.float32)  # other memory for each parameter
        elif roll < 0.5:
            gc.collect()


def random_options(rng: random.Random, kinds: tuple[str, ...]) -> dict[str, Any]:
    """A session's, which moves some of `kinds`."""
    swap = [kind for kind in kinds if rng.random() < 0.6] or [kinds[-1]]
    return {
        "budget": rng.choice((0, 0, 1 << 20, 3 << 20, 1 << 40)),
        "swap": ",".join(swap),
        "min_size": rng.choice((0, 1 << 16)),
    }


def compare(seed: int, kinds: tuple[str, ...]) -> str:
    """One training, plain and with sessions; how they differ, or nothing."""
    steps = random.Random(seed).randint(3, 6)
    plain = Training(seed).run(steps)
    rng = random.Random(-1 - seed)
    options = random_options(rng, kinds)
    sessions: list[Session] = []

    def around(training: Training) -> None:
        if not sessions or rng.random() < 0.1:
            disable()
            sessions.append(Session(training.model, training.optimizer, **options).open())
        elif rng.random() < 0.2:
            sessions[-1].stats()

    try:
        training = Training(seed)
        ours = training.run(steps, around)
    finally:
        disable()
    told = f"seed {seed}: {options}"
    if len(ours) != len(plain):
        return f"{told}: {len(ours)} results, and plain has {len(plain)}"
    differs = [place for place, (our, their) in enumerate(zip(ours, plain, strict=True)) if our != their]
    return f"{told}: result {differs[0]} of {len(plain)} and {len(differs) - 1} more differ" if differs else ""


def main(first: int, count: int, native: str | None = None) -> int:
    """The program."""
    if native is not None:
        from lms import build

        build.NATIVE = Path(native)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(first, first + count):
            if wrong := compare(seed, KINDS):
                print(wrong)
                return 1
    print(f"{count} trainings are identical")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
