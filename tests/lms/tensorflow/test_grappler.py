"""What LMS foresees against TensorFlow's own estimate of a GPU that is not there (Grappler's virtual cluster)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="no TensorFlow")
keras = pytest.importorskip("keras", reason="no TensorFlow")

from tensorflow.core.framework.graph_pb2 import GraphDef  # noqa: E402
from tensorflow.core.protobuf.device_properties_pb2 import DeviceProperties, NamedDevice  # noqa: E402
from tensorflow.python.grappler import cluster as grappler_cluster  # noqa: E402
from tensorflow.python.grappler import item as grappler_item  # noqa: E402
from tests.lms.tensorflow import models  # noqa: E402
from tests.lms.tensorflow.models import compiled  # noqa: E402

from lms.tensorflow import Traced, offload  # noqa: E402
from lms.tensorflow.traced import _content  # noqa: E402

TASK = "/job:localhost/replica:0/task:0/device:"


def traced(make: Any, budget: str) -> tuple[Traced, GraphDef, Any]:
    """What LMS did to one step on a device beside its host, the edited graph, and the inputs of the function's own."""
    decorator = offload(budget=budget, host="/device:CPU:0")
    graphs: list[bytes] = []
    edited = decorator._edited

    def keep(*given: Any) -> bytes:
        graphs.append(edited(*given))
        return graphs[-1]

    decorator._edited = keep
    with tf.device("CPU:1"):
        model = compiled(make)
        model.optimizer.build(model.trainable_variables)

        @tf.function
        @decorator
        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        x = np.random.default_rng(0).normal(size=(16, *model.input_shape[1:])).astype("f4")
        given = tf.constant(x), tf.constant(np.arange(16) % 10)
        step(*given)
        inputs = step.get_concrete_function(*given).graph.inputs
    return decorator.traces[-1], GraphDef.FromString(graphs[-1]), inputs


def estimate(definition: GraphDef, inputs: Any) -> int:
    """The most bytes on the device, if CPU:1 were a GPU."""
    for node in definition.node:
        node.device = node.device.replace("CPU:1", "GPU:0")
        if node.op == "_Arg":
            tensor = inputs[node.attr["index"].i]
            node.attr.clear()
            if tensor.dtype == tf.resource:
                content = _content(tensor)
                node.op, shape, dtype = "VarHandleOp", content.shape, content.dtype
                node.attr["shared_name"].s = node.name.encode()
            else:
                node.op, shape, dtype = "Placeholder", tensor.shape.as_proto(), tensor.dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(shape)
            node.attr["dtype"].type = dtype
        elif node.op == "_Retval":
            kind = node.attr["T"].type
            node.attr.clear()
            node.op = "Identity"
            node.attr["T"].type = kind
    _tell_the_scheduler(definition)
    read = {one.lstrip("^").partition(":")[0] for node in definition.node for one in node.input}
    ends = [node.name for node in definition.node if node.name not in read]
    definition.node.add(name="all", op="NoOp", input=[f"^{name}" for name in ends], device=f"{TASK}CPU:0")
    graph = tf.compat.v1.MetaGraphDef(graph_def=definition)
    graph.collection_def["train_op"].node_list.value.append("all")
    host = DeviceProperties(type="CPU", frequency=1000, num_cores=4)
    slow = {"frequency": 10, "bandwidth": 10**5}  # so that no two operations begin in the same microsecond
    device = DeviceProperties(type="GPU", num_cores=60, environment={"architecture": "7"}, **slow)
    named = {f"{TASK}CPU:0": host, f"{TASK}GPU:0": device}
    virtual = grappler_cluster.Cluster(devices=[NamedDevice(name=name, properties=its) for name, its in named.items()])
    usage = virtual.DeterminePeakMemoryUsage(grappler_item.Item(graph))
    return usage[f"{TASK}GPU:0"][0]


def _tell_the_scheduler(definition: GraphDef) -> None:
    """Add what the virtual cluster does not know of how TensorFlow runs a graph.

    An operation's inputs are free before the next one begins, and not a nanosecond later: so each control edge gets a
    little work. What came from another device stays until its last reader is done, and is not gone at once: so it
    gets a node there.
    """
    nodes = {node.name: node for node in definition.node}
    added: dict[str, Any] = {}

    def add(name: str, op: str, device: str, dtype: int, inputs: Sequence[str] = ()) -> str:
        if name not in added:
            added[name] = definition.node.add(name=name, op=op, device=device, input=inputs)
            added[name].attr["dtype" if op == "Const" else "T"].type = dtype
        return name

    def pause(control: str, device: str) -> str:
        number = tf.float32.as_datatype_enum
        work = add(f"work_{device[-5:].replace(':', '_')}", "Const", device, number)
        added[work].attr["value"].tensor.CopyFrom(tf.make_tensor_proto(np.zeros(256, "f4")))
        return f"^{add(f'{control[1:]}_pause_{device[-5:-2]}', 'Neg', device, number, [work, control])}"

    for node in nodes.values():
        for at, one in enumerate(node.input):
            source = nodes[one.lstrip("^").partition(":")[0]]
            if one.startswith("^"):
                node.input[at] = pause(one, node.device)
            elif source.op == "LmsGate" and source.device != node.device:
                later = pause(pause(f"^{one}", node.device), node.device)  # when the copy's own moment is over
                node.input[at] = add(f"{one}_back", "Identity", node.device, source.attr["T"].type, [one, later])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", ["cnn", "resnet", "unet", "transformer"])
def test_what_is_foreseen_is_not_below_what_tensorflow_estimates(make: str) -> None:
    for budget in ("100%", "35%", "0%"):
        done, definition, inputs = traced(getattr(models, make), budget)
        assert (done.swapped > 0) == (budget != "100%")
        assert done.predicted_peak >= 0.97 * estimate(definition, inputs)


@pytest.mark.timeout(600)
def test_a_unet_needs_two_fifths_of_the_memory() -> None:
    plain, managed = (estimate(*traced(models.unet, budget)[1:]) for budget in ("100%", "0%"))
    assert managed <= 0.4 * plain, f"{managed} of {plain} bytes"
