"""Editing a graph while it is traced, as a design says."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from lms.tensorflow.graph import Step
from lms.tensorflow.order import Design, Token
from lms.tensorflow.patterns import SHAPES


class Tier(Protocol):
    """Makes the operations of one pair, and those that order them; called inside the graph that is edited."""

    def swap_out(self, tensor: Any, index: int) -> Any:
        """The handle of what left."""

    def swap_in(self, handle: Any, like: Any, tokens: list[Any], index: int, name: str) -> Any:
        """The tensor again, read once the tokens are there."""

    def token(self, handle: Any, index: int) -> Any:
        """A token that is there once the copy out is over."""

    def tap(self, tensor: Any, index: int) -> Any:
        """A token that is there once the tensor is."""

    def gate(self, tensor: Any, tokens: list[Any], index: int, name: str) -> Any:
        """The tensor, once the tokens are there."""


@dataclass(frozen=True)
class Rewritten:
    """What was put into the graph. Bytes of one run of it."""

    outs: int
    ins: int
    nbytes: int
    peak: int  # most bytes, however long the copies take; what was there before is in it


def rewrite(graph: Any, step: Step, design: Design, tier: Tier) -> Rewritten:
    """Make the edits of `design`."""
    with graph.name_scope(None):
        return _Editor(graph, step, design, tier).run()


def _name(tensor: Any) -> str:
    """A name that sorts as the tensor's own: Grappler sorts what it adds and multiplies by name."""
    return f"{tensor.op.name}-lms"  # no character of a name comes before the hyphen


class _Editor:
    def __init__(self, graph: Any, step: Step, design: Design, tier: Tier) -> None:
        self.graph, self.step, self.design, self.tier = graph, step, design, tier
        self.handles: dict[int, Any] = {}  # storage -> handle of its copy out
        self.tokens: dict[Token, Any] = {}
        self.made = 0  # operations: no two have the same number, so that none is taken for another

    def run(self) -> Rewritten:
        step, design = self.step, self.design
        for storage in design.outs:
            source = step.storages[storage].tensor
            with tf.device(source.device):
                self.handles[storage] = self.tier.swap_out(source, self._number())
        came: list[Any] = []
        fresh: dict[int, list[tuple[int, Any]]] = {}  # storage -> (first reader, the tensor), ascending
        for back in design.backs:
            source = step.storages[back.storage].tensor
            values, controls = self._waited(back.tokens)
            with self.graph.control_dependencies(controls), tf.device(source.device):
                tensor = self.tier.swap_in(self.handles[back.storage], source, values, self._number(), _name(source))
            tensor.set_shape(source.shape)
            came.append(tensor)
            fresh.setdefault(back.storage, []).append((back.reader, tensor))
        gated: dict[int, Any] = {}  # id of a tensor -> what its readers read in its place
        for gate in design.gates:
            tensor = gate.tensor if gate.back is None else came[gate.back]
            values, controls = self._waited(gate.tokens)
            with self.graph.control_dependencies(controls), tf.device(tensor.device):
                same = self.tier.gate(tensor, values, self._number(), _name(tensor))
            same.set_shape(tensor.shape)
            gated[id(tensor)] = same
        self._connect(fresh, gated)
        return Rewritten(
            outs=len(design.outs),
            ins=len(design.backs),
            nbytes=sum(step.storages[storage].nbytes for storage in design.outs),
            peak=design.peak,
        )

    def _number(self) -> int:
        self.made += 1
        return self.made

    def _waited(self, tokens: list[Token]) -> tuple[list[Any], list[Any]]:
        """Tokens as tensors, and operations without any result, to be waited for by control edges."""
        values, controls = [], []
        for token in tokens:
            if token.out is not None:
                if token not in self.tokens:
                    self.tokens[token] = self.tier.token(self.handles[token.out], self._number())
                values.append(self.tokens[token])
                continue
            assert token.operation is not None
            op = self.step.operations[token.operation].op
            if not op.outputs:
                controls.append(op)
                continue
            if token not in self.tokens:
                tensor = self.step.patterns.tap(op)
                assert tensor is not None
                with tf.device(tensor.device):
                    self.tokens[token] = self.tier.tap(tensor, self._number())
            values.append(self.tokens[token])
        return values, controls

    def _connect(self, fresh: dict[int, list[tuple[int, Any]]], gated: dict[int, Any]) -> None:
        """Point every later reader of what came back at the tensor that came back, and of what is gated at the gate."""
        step = self.step
        views: dict[tuple[int, tuple[Any, ...]], Any] = {}
        readers = {storage: [reader for reader, _ in pairs] for storage, pairs in fresh.items()}
        places = {operation.op: at for at, operation in enumerate(step.operations)}
        for op in step.live:
            if op.type in SHAPES:
                continue
            at = places.get(op)
            for slot, tensor in enumerate(op.inputs):
                new = tensor
                storage = step.index.get(id(tensor))
                if at is not None and storage in fresh and (which := bisect_right(readers[storage], at) - 1) >= 0:
                    new = fresh[storage][which][1]
                    new = gated.get(id(new), new)
                    shape = tuple(tensor.shape)
                    if shape != tuple(new.shape):
                        if (id(new), shape) not in views:
                            with tf.device(new.device):
                                views[id(new), shape] = tf.reshape(new, tf.shape(tensor), name=_name(tensor))
                        new = views[id(new), shape]
                elif id(tensor) in gated:
                    new = gated[id(tensor)]
                if new is not tensor:
                    op._update_input(slot, new)
