"""A graph as TensorFlow runs it, after its optimizers: nodes, and one order of them that every edge follows."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

SHAPES = {"Shape", "ShapeN", "Size", "Rank"}  # they hold their input until they run, so they run at once
CONTROL_FLOW = {"Switch", "_SwitchN", "Merge", "Enter", "Exit", "NextIteration", "LoopCond"}
_AT_ONCE = -1.0
_AT_LAST = float("inf")


@dataclass(eq=False)
class Node:
    """A node. Inputs are in the order of its operation's arguments."""

    definition: Any  # its NodeDef
    name: str
    op: str
    inputs: list[tuple[str, int]]  # (name of a node, which of its outputs)
    controls: list[str]
    frame: str = ""  # the loops that it runs in
    conditions: frozenset[tuple[str, int]] = field(default=frozenset())  # what must hold for it to run


def read_nodes(definition: Any, number: Callable[[str], int | None]) -> list[Node]:
    """The nodes of a GraphDef in an order that its edges follow: else by `number`, the place in which they were made.

    A node without a number comes right before the first that needs it. Edges from one turn of a loop to the next do
    not count.
    """
    nodes = {one.name: _node(one) for one in definition.node}
    before = {name: _sources(node, nodes) for name, node in nodes.items()}
    turns: dict[str, set[str]] = {}  # frame -> where each turn of its loop ends
    for name in _sorted(before, {}):
        _place(nodes[name], nodes)
        if nodes[name].op == "NextIteration":
            turns.setdefault(nodes[name].frame, set()).add(name)
    for name, node in nodes.items():
        if node.op == "Exit":  # it comes after all turns, whatever it leaves with
            before[name] |= turns.get(node.frame, set())
    after = _readers(before)
    due: dict[str, float] = {}
    for name in reversed(_sorted(before, {})):
        made = number(name)
        if nodes[name].op in SHAPES:
            due[name] = _AT_ONCE
        elif made is not None:
            due[name] = made
        else:
            due[name] = min((due[one] for one in after[name]), default=_AT_LAST) - 0.5
    return [nodes[name] for name in _sorted(before, due)]


def _node(definition: Any) -> Node:
    inputs, controls = [], []
    for one in definition.input:
        if one[0] == "^":
            controls.append(one[1:])
        else:
            name, _, slot = one.partition(":")
            inputs.append((name, int(slot or 0)))
    return Node(definition, definition.name, definition.op, inputs, controls)


def _sources(node: Node, nodes: dict[str, Node]) -> set[str]:
    found = {name for name, _ in node.inputs} | set(node.controls)
    if node.op == "Merge":
        return {name for name in found if nodes[name].op != "NextIteration"}
    return found


def _readers(before: dict[str, set[str]]) -> dict[str, list[str]]:
    after: dict[str, list[str]] = {name: [] for name in before}
    for name, sources in before.items():
        for source in sources:
            after[source].append(name)
    return after


def _sorted(before: dict[str, set[str]], due: dict[str, float]) -> list[str]:
    """Names in topological order; of those that are ready, the one that is due first."""
    after = _readers(before)
    waiting = {name: len(sources) for name, sources in before.items()}
    ready = [(due.get(name, 0.0), at, name) for at, name in enumerate(before) if not waiting[name]]
    heapq.heapify(ready)
    count, found = len(waiting), []
    while ready:
        _, _, name = heapq.heappop(ready)
        found.append(name)
        for one in after[name]:
            waiting[one] -= 1
            if not waiting[one]:
                count += 1
                heapq.heappush(ready, (due.get(one, 0.0), count, one))
    return found


def _place(node: Node, nodes: dict[str, Node]) -> None:
    """Tell the frame and the conditions of a node from those of its inputs."""
    sources = [(nodes[name], slot) for name, slot in node.inputs] + [(nodes[name], -1) for name in node.controls]
    sources = [pair for pair in sources if pair[0].op != "NextIteration"]
    if not sources:
        return
    first = sources[0][0]
    node.frame = first.frame
    if first.op == "Enter":
        node.frame += "\n" + first.definition.attr["frame_name"].s.decode()
    elif first.op == "Exit":
        node.frame = first.frame.rpartition("\n")[0]
    if node.op == "Exit":
        node.conditions = first.conditions  # it reads a Switch, and runs once whatever way that goes
        return
    found = [_conditions(*pair) for pair in sources]
    if node.op == "Merge":
        node.conditions = reduce(frozenset.intersection, found)
    else:
        node.conditions = frozenset().union(*found)


def _conditions(source: Node, slot: int) -> frozenset[tuple[str, int]]:
    if source.op in ("Switch", "_SwitchN") and slot >= 0:
        return source.conditions | {(source.inputs[1][0], slot)}
    return source.conditions
