"""How long a net's layers take, forward and backward: `caffe time`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from bascule_caffe.layer import Layer
from bascule_caffe.net import Net


class _Clock:
    """Adds up the time between marks, on each mark's account. Waits for the device before it looks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[object, float] = {}
        self._account: object = None
        self._since = 0.0

    def mark(self, account: object) -> None:
        """From now on, time is on this account; None stops the clock."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self._account is not None:
            self.seconds[self._account] = self.seconds.get(self._account, 0.0) + now - self._since
        self._account, self._since = account, now


def random_inputs(net: Net) -> dict[str, Tensor]:
    """Numbers from 0 to 1 for the net's Input layers; labels are 0."""
    names = [top for layer in net.layers if layer.kind == "Input" for top in layer.tops]
    labels = {layer.bottoms[1] for layer in net.layers if layer.kind in ("Accuracy", "SoftmaxWithLoss", "HingeLoss")}
    make = {True: torch.zeros, False: torch.rand}
    return {name: make[name in labels](net.shapes[name]).to(net.anchor) for name in names}


def time_net(net: Net, iterations: int = 50, write: Callable[[str], object] = print) -> None:
    """Runs a net forward and backward, and writes the time of each layer and of all, in Caffe's lines.

    The first run, which allocates, is not counted. A layer's backward lasts from its tops' gradients to the next
    layer's. The averages of the passes are of runs of their own, in which no layer is timed.
    """
    blobs = random_inputs(net)
    clock = _Clock(net.anchor.device)
    write("Performing Forward")
    _run(net, blobs, clock)
    write(f"Initial loss: {net.loss.item():g}")
    clock.seconds.clear()
    write("*** Benchmark begins ***")
    write(f"Testing for {iterations} iterations.")
    for iteration in range(iterations):
        before = sum(clock.seconds.values())
        _run(net, blobs, clock)
        write(
            f"Iteration: {iteration + 1} forward-backward time: {1e3 * (sum(clock.seconds.values()) - before):.3f} ms."
        )
    forward, backward = clock.seconds.pop("forward", 0.0), clock.seconds.pop("backward", 0.0)
    hooks = [hook for layer in net.layers for hook in _timed(layer, clock)]
    clock.seconds.clear()
    try:
        for _ in range(iterations):
            _run(net, blobs, clock)
    finally:
        for hook in hooks:
            hook.remove()
    write("Average time per layer: ")
    for layer in net.layers:
        for direction in ("forward", "backward"):
            took = clock.seconds.get((layer.name, direction), 0.0) / iterations
            write(f"{layer.name:>10}\t{direction}: {1e3 * took:g} ms.")
    write(f"Average Forward pass: {1e3 * forward / iterations:g} ms.")
    write(f"Average Backward pass: {1e3 * backward / iterations:g} ms.")
    write(f"Average Forward-Backward: {1e3 * (forward + backward) / iterations:g} ms.")
    write(f"Total Time: {1e3 * (forward + backward):g} ms.")
    write("*** Benchmark ends ***")


def _run(net: Net, blobs: dict[str, Tensor], clock: _Clock) -> None:
    """Once forward and backward. A net without a loss goes backward from the sum of its outputs."""
    for entry in net.learnable:
        entry.parameter.grad = None
    clock.mark("forward")
    outputs = net(blobs)
    clock.mark("backward")
    loss = net.loss
    if not loss.requires_grad:
        loss = torch.stack([top.sum() for top in outputs.values() if top.requires_grad] or [loss]).sum()
    if loss.requires_grad:
        loss.backward()
    clock.mark(None)


def _timed(layer: Layer, clock: _Clock) -> list[torch.utils.hooks.RemovableHandle]:
    """Lets a layer's passes mark the clock."""

    def before(*_: object) -> None:
        clock.mark((layer.name, "forward"))

    def after(module: object, bottoms: object, tops: Tensor | list[Tensor]) -> None:
        clock.mark("forward")
        for top in [tops] if isinstance(tops, Tensor) else tops:
            if top.requires_grad:
                top.register_hook(lambda gradient: clock.mark((layer.name, "backward")))

    return [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
