"""The order of an optimized graph, what is in its step, and the copies that are put into it."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("tensorflow", reason="no TensorFlow")

from tensorflow.core.framework.graph_pb2 import GraphDef

from lms.core.link import Link
from lms.core.plan import make_plan
from lms.core.static import make_static
from lms.tensorflow.edit import edit
from lms.tensorflow.graph import read_nodes
from lms.tensorflow.step import read_step
from lms.tensorflow.swaps import make_swaps, plain
from lms.tensorflow.tiers import FileTier
from lms.tensorflow.traced import Known, Output

MB = 1_000_000


def graph(*nodes: tuple[str, str, list[str]]) -> GraphDef:
    definition = GraphDef()
    for name, op, inputs in nodes:
        definition.node.add(name=name, op=op, input=inputs, device="/device:CPU:0")
    return definition


def known(*names: str, nbytes: int = MB) -> Known:
    output = Output(nbytes, 1, floating=True)
    return Known(
        {name: at for at, name in enumerate(names)}, dict.fromkeys(names, (output,)), 0, 0, {}, 0, random=False
    )


def names(definition: GraphDef, numbers: dict[str, int]) -> list[str]:
    return [node.name for node in read_nodes(definition, numbers.get)]


def test_nodes_run_in_the_order_in_which_they_were_made() -> None:
    found = names(graph(("c", "Neg", ["a"]), ("b", "Neg", ["a"]), ("a", "Const", [])), {"a": 0, "b": 1, "c": 2})
    assert found == ["a", "b", "c"]


def test_an_edge_goes_before_the_order_in_which_nodes_were_made() -> None:
    assert names(graph(("a", "Neg", ["b"]), ("b", "Const", [])), {"a": 0, "b": 1}) == ["b", "a"]


def test_a_node_that_an_optimizer_made_comes_right_before_the_first_that_needs_it() -> None:
    found = names(graph(("new", "Const", []), ("a", "Const", []), ("b", "Add", ["a", "new"])), {"a": 0, "b": 1})
    assert found == ["a", "new", "b"]


def test_shapes_are_asked_for_at_once() -> None:
    found = names(graph(("a", "Const", []), ("b", "Neg", ["a"]), ("size", "Shape", ["a"])), {"a": 0, "b": 1, "size": 2})
    assert found == ["a", "size", "b"]


def test_a_cast_that_an_optimizer_moved_has_the_type_that_it_makes() -> None:
    # Grappler makes "x, cast, reshape" into "x, reshape, cast", and gives both new names.
    definition = graph(("mark", "NoOp", []), ("x", "Source", []), ("new", "Cast", ["x"]), ("known", "Cast", ["x"]))
    for node in definition.node[2:]:
        node.attr["SrcT"].type, node.attr["DstT"].type = 1, 9  # float32, int64
    nodes = read_nodes(definition, lambda name: None)
    step = read_step(nodes, nodes[0], known("x", "known"), "", min_size=1, base=0)
    made = {one.source[0]: one for one in step.storages}
    assert made["x"].output == Output(MB, 1, floating=True)
    assert made["new"].output == made["known"].output == Output(2 * MB, 9, floating=False)
    assert not made["new"].movable


def test_what_runs_in_a_branch_alone_is_known() -> None:
    nodes = read_nodes(
        graph(
            ("p", "Const", []),
            ("x", "Const", []),
            ("fork", "Switch", ["x", "p"]),
            ("yes", "Neg", ["fork:1"]),
            ("no", "Neg", ["fork"]),
            ("join", "Merge", ["no", "yes"]),
            ("after", "Neg", ["join"]),
        ),
        lambda name: None,
    )
    conditions = {node.name: node.conditions for node in nodes}
    assert conditions["yes"] == {("p", 1)}
    assert conditions["no"] == {("p", 0)}
    assert conditions["fork"] == conditions["join"] == conditions["after"] == frozenset()


def test_what_runs_in_a_loop_is_known() -> None:
    definition = graph(
        ("x", "Const", []),
        ("enter", "Enter", ["x"]),
        ("merge", "Merge", ["enter", "next"]),
        ("less", "Less", ["merge"]),
        ("cond", "LoopCond", ["less"]),
        ("fork", "Switch", ["merge", "cond"]),
        ("body", "Neg", ["fork:1"]),
        ("next", "NextIteration", ["body"]),
        ("exit", "Exit", ["fork"]),
        ("after", "Neg", ["exit"]),
    )
    definition.node[1].attr["frame_name"].s = b"a/loop"
    nodes = {node.name: node for node in read_nodes(definition, lambda name: None)}
    assert nodes["body"].frame == "\na/loop"
    assert nodes["body"].conditions == {("cond", 1)}
    assert nodes["after"].frame == ""
    assert nodes["after"].conditions == frozenset()


def test_what_a_loop_leaves_with_comes_after_all_that_enters_it() -> None:
    definition = graph(
        ("x", "Const", []),
        ("late", "Neg", ["x"]),
        *((f"{one}_enter", "Enter", [source]) for one, source in (("a", "x"), ("b", "late"))),
        *((f"{one}_merge", "Merge", [f"{one}_enter", f"{one}_next"]) for one in "ab"),
        ("cond", "LoopCond", ["a_merge"]),
        *((f"{one}_fork", "Switch", [f"{one}_merge", "cond"]) for one in "ab"),
        ("a_next", "NextIteration", ["a_fork:1"]),
        ("b_next", "NextIteration", ["b_fork:1"]),
        ("a_exit", "Exit", ["a_fork"]),
        ("after", "Neg", ["a_exit"]),
    )
    found = names(definition, {"after": 0, "late": 1})
    assert found.index("after") > found.index("late")


def chain(length: int = 6) -> tuple[GraphDef, Known]:
    """A forward chain, and a backward one that reads its tensors in reverse."""
    made = ["f0"] + [f"f{at}" for at in range(1, length)] + [f"b{at}" for at in reversed(range(length))]
    nodes = [("f0", "Source", [])] + [(f"f{at}", "Tanh", [f"f{at - 1}"]) for at in range(1, length)]
    nodes += [
        (f"b{at}", "TanhGrad", [f"f{at}", f"b{at + 1}" if at + 1 < length else f"f{at}"])
        for at in reversed(range(length))
    ]
    return graph(*nodes, ("mark", "LmsMark", [])), known(*made)


def planned(definition: GraphDef, knowledge: Known, budget: int, **knobs: int):
    nodes = read_nodes(definition, knowledge.numbers.get)
    mark = next(node for node in nodes if node.op == "LmsMark")
    step = read_step(nodes, mark, knowledge, "", min_size=1, base=10 * MB)
    plan = make_plan(step.trace, Link("file", 1e9, 1e9), budget=budget)
    return step, make_swaps(step, make_static(step.trace, plan), **knobs)


def test_copies_lower_the_peak() -> None:
    step, swaps = planned(*chain(), budget=0)
    assert plain(step).peak == 10 * MB + 7 * MB
    assert swaps.peak < plain(step).peak
    assert len(swaps.outs) == len(swaps.backs)


def test_every_operation_waits_for_the_one_before_and_late_readers_read_the_copy() -> None:
    definition, knowledge = chain()
    step, swaps = planned(definition, knowledge, budget=0)
    edit(definition, step, swaps, _tier(), "lms_", plan=1)
    nodes = {node.name: node for node in definition.node}
    assert "^f2" in nodes["f3"].input
    assert "^b4" in nodes["b3"].input
    out = next(node for node in definition.node if node.op == "LmsSwapOut" and node.input[0] == "f1:0")
    (back,) = (node for node in definition.node if node.op == "LmsSwapIn" and node.input[0] == out.name)
    assert nodes["b1"].input[0] == back.name
    assert nodes["f2"].input[0] == "f1"


def test_a_view_of_what_came_back_is_made_again() -> None:
    definition, knowledge = chain()
    definition.node.add(name="v", op="Reshape", input=["f1", "shape"], device="/device:CPU:0")
    definition.node.add(name="shape", op="Const", device="/device:CPU:0")
    next(node for node in definition.node if node.name == "b1").input[0] = "v"
    step, swaps = planned(definition, knowledge, budget=0)
    edit(definition, step, swaps, _tier(), "lms_", plan=1)
    nodes = {node.name: node for node in definition.node}
    view = nodes[nodes["b1"].input[0]]
    assert view.op == "Reshape"
    assert nodes[view.input[0]].op == "LmsSwapIn"
    assert view.input[1] == "shape"


def test_several_tensors_that_are_handed_on_are_no_new_ones() -> None:
    definition, knowledge = chain()
    definition.node.add(name="v", op="IdentityN", input=["f0", "f1"], device="/device:CPU:0")
    output = knowledge.outputs["f1"][0]
    knowledge = replace(knowledge, outputs={**knowledge.outputs, "v": (output, output)})
    next(node for node in definition.node if node.name == "b1").input[0] = "v:1"
    step, swaps = planned(definition, knowledge, budget=0)
    assert not any(storage.source[0] == "v" for storage in step.storages)
    edit(definition, step, swaps, _tier(), "lms_", plan=1)
    nodes = {node.name: node for node in definition.node}
    back = nodes[nodes["b1"].input[0]]
    assert (back.op, nodes[back.input[0]].input[0]) == ("LmsSwapIn", "f1:0")


def test_what_is_left_of_a_call_makes_nothing() -> None:
    definition, knowledge = chain()
    definition.node.add(name="call", op="NoOp", device="/device:CPU:0")
    knowledge = replace(knowledge, outputs={**knowledge.outputs, "call": knowledge.outputs["f1"]})
    step, _ = planned(definition, knowledge, budget=0)
    assert not any(storage.source[0] == "call" for storage in step.storages)


def test_nothing_waits_for_what_runs_in_a_branch_alone() -> None:
    definition, knowledge = chain()
    definition.node.add(name="p", op="Const", device="/device:CPU:0")
    definition.node.add(name="fork", op="Switch", input=["f2", "p"], device="/device:CPU:0")
    definition.node.add(name="yes", op="Neg", input=["fork:1"], device="/device:CPU:0")
    step, swaps = planned(definition, knowledge, budget=0)
    edit(definition, step, swaps, _tier(), "lms_", plan=1)
    inside = [node.name for node in definition.node if any(one in node.input for one in ("^yes", "^fork"))]
    assert inside == []
    assert not any(
        one.startswith("^") for node in definition.node if node.name in ("yes", "fork") for one in node.input
    )
    assert not any(step.storages[out.storage].source[0] == "f2" for out in swaps.outs)


def test_readers_that_are_near_share_one_copy() -> None:
    definition, knowledge = chain()
    several = planned(definition, knowledge, budget=0)[1]
    assert len(planned(definition, knowledge, budget=0, group=100)[1].backs) <= len(several.backs)


def _tier() -> FileTier:
    return FileTier.__new__(FileTier)  # the names of its operations are all that is needed
