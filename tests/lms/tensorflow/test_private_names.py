"""Each name that LMS uses and that neither TensorFlow nor Keras promises to keep."""

from __future__ import annotations

import inspect
from functools import reduce
from importlib import import_module

import pytest

tf = pytest.importorskip("tensorflow", reason="no TensorFlow")
keras = pytest.importorskip("keras", reason="no TensorFlow")

TRAINER = "keras.src.backend.tensorflow.trainer"


@pytest.mark.parametrize(
    ("module", "name", "user"),
    [
        ("tensorflow.core.framework.graph_pb2", "GraphDef.FromString", "decorator.py"),
        ("tensorflow.python.eager.context", "async_wait", "decorator.py"),
        ("tensorflow.python.framework.op_def_registry", "get", "traced.py"),
        ("tensorflow.python.ops.handle_data_util", "get_resource_handle_data", "traced.py"),
        (TRAINER, "TensorFlowTrainer.fit", "launcher.py"),
        (TRAINER, "TensorFlowTrainer.make_train_function", "keras.py"),
    ],
)
def test_a_name_is_there(module: str, name: str, user: str) -> None:
    try:
        reduce(getattr, name.split("."), import_module(module))
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{module}.{name}, which lms/tensorflow/{user} uses, is gone: {error}")


@pytest.mark.parametrize(("method", "parameter"), [("fit", "callbacks"), ("make_train_function", "force")])
def test_a_method_takes_a_parameter(method: str, parameter: str) -> None:
    given = inspect.signature(getattr(import_module(TRAINER).TensorFlowTrainer, method)).parameters
    assert parameter in given, f"{TRAINER}.TensorFlowTrainer.{method} has no {parameter} any more"


def test_a_function_knows_that_xla_compiles_it() -> None:
    function = tf.function(lambda: tf.constant(1), jit_compile=True)
    assert type(function).__name__ == "Function"
    assert function._jit_compile is True, "Function._jit_compile, which lms/tensorflow/decorator.py uses, is gone"
    copy = function._clone(lambda: tf.constant(2))
    assert copy._jit_compile is True, "Function._clone, which lms/tensorflow/decorator.py uses, forgets options"


def test_a_graph_knows_the_functions_that_it_calls() -> None:
    inner = tf.function(lambda x: tf.tanh(x, name="inside"))
    graph = tf.function(lambda: inner(tf.constant(1.0))).get_concrete_function().graph
    (call,) = (op for op in graph.get_operations() if op.type == "PartitionedCall")
    found = graph._get_function(call.get_attr("f").name)
    assert "inside" in [op.name for op in found.graph.get_operations()], (
        "Graph._get_function(...).graph, which lms/tensorflow/traced.py uses, is not the function's graph any more"
    )


def test_fit_calls_the_train_function_that_a_callback_has_set() -> None:
    called = []

    class Change(keras.callbacks.Callback):
        def on_train_begin(self, logs: object = None) -> None:
            inner = self.model.train_function
            self.model.train_function = lambda iterator: called.append(1) or inner(iterator)

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(tf.zeros((4, 1)), tf.zeros((4, 1)), batch_size=2, verbose=0, callbacks=[Change()])
    assert len(called) == 2, "model.train_function, which lms/tensorflow/keras.py sets, is not what fit calls"
