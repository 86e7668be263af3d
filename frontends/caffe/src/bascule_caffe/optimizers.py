"""Caffe's six solvers as optimizers of PyTorch, with Caffe's formulas.

They differ from those of `torch.optim`: a history of Caffe's holds steps (V = mV + rate * gradient), so that a change
of the rate takes effect as it did in Caffe; Adam's delta stands beside the corrected root. The order of a step is
Caffe's: clip, divide by iter_size, add the regularisation, update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """What all parameters share in one step; the fields are those of SolverParameter."""

    momentum: float = 0.0
    momentum2: float = 0.999
    delta: float = 1e-8
    rms_decay: float = 0.99
    weight_decay: float = 0.0
    regularization_type: str = "L2"
    clip_gradients: float = -1.0
    iter_size: int = 1


class CaffeOptimizer(torch.optim.Optimizer):
    """The base of the solvers.

    `params` is what `torch.optim.Optimizer` takes; a group may have `lr_mult` and `decay_mult`. `lr` is the rate
    before `lr_mult`: set it in each group before a step. `iteration` counts steps. After a step `grad` holds what was
    subtracted from the parameter, as a diff of Caffe does. `on_clip(norm, limit)` is called if gradients are clipped.
    Raises ValueError for a regularisation other than L1 and L2.
    """

    names: ClassVar[tuple[str, ...]] = ("history",)  # of a parameter's state, in the order of a solverstate

    def __init__(self, params: Iterable[Any], lr: float = 0.01, **fields: Any) -> None:
        self.fields = Step(**fields)
        if self.fields.regularization_type not in ("L1", "L2"):
            raise ValueError(f"regularization_type is {self.fields.regularization_type!r}: L1 and L2 are allowed")
        self.iteration = 0
        self.on_clip: Callable[[float, float], None] | None = None
        super().__init__(params, {"lr": lr, "lr_mult": 1.0, "decay_mult": 1.0})

    def histories(self) -> list[Tensor]:
        """All histories in the order of a solverstate: the first of each parameter, then the second of each."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        return [self._state(p)[name] for name in self.names for p in parameters]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. `closure`, if given, computes gradients and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._clip()
        for group in self.param_groups:
            decay = self.fields.weight_decay * group["decay_mult"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                change = parameter.grad
                if self.fields.iter_size != 1:
                    change.div_(self.fields.iter_size)
                if decay:
                    change.add_(parameter if self.fields.regularization_type == "L2" else parameter.sign(), alpha=decay)
                self._change(change, group["lr"] * group["lr_mult"], *self._state(parameter).values())
                parameter.sub_(change)
        self.iteration += 1
        return loss

    def _change(self, change: Tensor, rate: float, *histories: Tensor) -> None:
        """Replace the gradient in `change` by what is to be subtracted."""
        raise NotImplementedError

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        for name in self.names:
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _clip(self) -> None:
        limit = self.fields.clip_gradients
        if limit < 0:
            return
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if norm > limit:
            if self.on_clip is not None:
                self.on_clip(norm, limit)
            for gradient in gradients:
                gradient.mul_(limit / norm)


class SGD(CaffeOptimizer):
    """V = momentum * V + rate * gradient; the parameter moves by V."""

    def _change(self, change: Tensor, rate: float, *histories: Tensor) -> None:
        (history,) = histories
        change.copy_(history.mul_(self.fields.momentum).add_(change, alpha=rate))


class Nesterov(CaffeOptimizer):
    """SGD whose parameter moves by (1 + momentum) V - momentum * (the V before)."""

    def _change(self, change: Tensor, rate: float, *histories: Tensor) -> None:
        (history,) = histories
        momentum = self.fields.momentum
        before = history.clone()
        history.mul_(momentum).add_(change, alpha=rate)
        change.copy_(history).mul_(1 + momentum).sub_(before, alpha=momentum)


class AdaGrad(CaffeOptimizer):
    """The rate is divided by the root of the sum of all squared gradients, plus delta."""

    def _change(self, change: Tensor, rate: float, *histories: Tensor) -> None:
        (history,) = histories
        history.addcmul_(change, change)
        change.div_(history.sqrt().add_(self.fields.delta)).mul_(rate)


class RMSProp(CaffeOptimizer):
    """AdaGrad over an exponential mean of the squared gradients (rms_decay)."""

    def _change(self, change: Tensor, rate: float, *histories: Tensor) -> None:
        (history,) = histories
        decay = self.fields.rms_decay
        history.mul_(decay).addcmul_(change, change, value=1 - decay)
        change.div_(history.sqrt().add_(self.fields.delta)).mul_(rate)


class AdaDelta(CaffeOptimizer):
    """Steps in proportion to the root mean square of the last steps (Zeiler, 2012); momentum is both means' decay."""

    names = ("history", "steps")

    def _change(self, change: Tensor, rate: float, *histories: Tensor) -> None:
        gradients, steps = histories
        momentum, delta = self.fields.momentum, self.fields.delta
        gradients.mul_(momentum).addcmul_(change, change, value=1 - momentum)
        change.mul_(steps.add(delta).div_(gradients.add(delta)).sqrt_())
        steps.mul_(momentum).addcmul_(change, change, value=1 - momentum)
        change.mul_(rate)


class Adam(CaffeOptimizer):
    """Kingma and Ba (2015), in the form at the end of section 2: delta is added to the root before its correction."""

    names = ("history", "squares")

    def _change(self, change: Tensor, rate: float, *histories: Tensor) -> None:
        means, squares = histories
        momentum, momentum2 = self.fields.momentum, self.fields.momentum2
        means.mul_(momentum).add_(change, alpha=1 - momentum)
        squares.mul_(momentum2).addcmul_(change, change, value=1 - momentum2)
        step = self.iteration + 1
        correction = math.sqrt(1 - momentum2**step) / (1 - momentum**step)
        torch.div(means, squares.sqrt().add_(self.fields.delta), out=change).mul_(rate * correction)


SOLVERS: dict[str, type[CaffeOptimizer]] = {  # in the order of solver_type
    kind.__name__: kind for kind in (SGD, Nesterov, AdaGrad, RMSProp, AdaDelta, Adam)
}
