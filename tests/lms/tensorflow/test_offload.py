"""`offload`, for a tf.function and under Keras, on a CPU with the file tier."""

from __future__ import annotations

import functools
import multiprocessing
import warnings

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="no TensorFlow")
keras = pytest.importorskip("keras", reason="no TensorFlow")

from tests.lms.tensorflow.models import cnn, compiled, fit, same  # noqa: E402

from lms.errors import LimitError, LMSError, UsageError  # noqa: E402
from lms.memory.resident import ResidentSet  # noqa: E402
from lms.tensorflow import LMS, offload, tiers  # noqa: E402
from lms.tensorflow.decorator import _check_version  # noqa: E402
from lms.tensorflow.traced import _content  # noqa: E402


def layers(width: int = 128, depth: int = 6) -> list:
    generator = np.random.default_rng(0)
    return [tf.Variable(generator.normal(size=(width, width)).astype("f4") / width**0.5) for _ in range(depth)]


def steps(decorate, count: int = 3) -> tuple[list[float], list[np.ndarray]]:
    variables = layers()
    data = tf.constant(np.random.default_rng(1).normal(size=(512, 128)).astype("f4"))

    def step(x):
        with tf.GradientTape() as tape:
            for weight in variables:
                x = tf.tanh(x @ weight)
            loss = tf.reduce_mean(x * x)
        for weight, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    function = decorate(step)
    return [float(function(data)) for _ in range(count)], [weight.numpy() for weight in variables]


ABOVE, BELOW = (lambda ours: lambda step: ours(tf.function(step))), (lambda ours: lambda step: tf.function(ours(step)))


def within(ours):
    """A step of ours as an argument of another function, which calls it."""
    return lambda step: functools.partial(tf.function(lambda step, x: step(x)), ours(tf.function(step)))


@pytest.mark.parametrize(
    ("place", "budget"),
    [*((ABOVE, budget) for budget in (0, "20%", "50%", "100%")), (BELOW, 0), (BELOW, "50%"), (within, "20%")],
)
def test_a_step_has_the_bits_that_it_has_without(place, budget) -> None:
    plain = steps(tf.function)
    decorator = offload(budget=budget)
    before = tiers.usage()
    assert same(steps(place(decorator)), plain)
    after = tiers.usage()
    (traced,) = decorator.traces
    assert after["outs"] - before["outs"] == 3 * traced.outs
    assert after["ins"] - before["ins"] == 3 * traced.ins
    assert after["live"] == 0
    assert (traced.outs == 0) == (budget == "100%")
    assert traced.predicted_peak <= traced.plain_peak


@pytest.mark.parametrize(
    "knobs",
    [
        {"swapout_threshold": 3},
        {"swapin_ahead": 0},
        {"swapin_ahead": 2},
        *({"sync_mode": mode} for mode in range(4)),
        {"swapin_groupby": 3},
        {"swapout_threshold": -1, "swapin_ahead": None},
    ],
)
def test_the_knobs_of_tflms_change_the_copies_and_not_the_bits(knobs) -> None:
    assert same(steps(ABOVE(offload(budget="20%", **knobs))), steps(tf.function))


def test_a_threshold_that_no_tensor_reaches_swaps_nothing() -> None:
    decorator = offload(budget="20%", swapout_threshold=10_000)
    steps(ABOVE(decorator), 1)
    assert decorator.traces[0].swapped == 0


@pytest.mark.parametrize("min_size", ["1KB", "1GB"])  # with the second no tensor can go
def test_a_limit_below_the_floor_names_the_floor(min_size) -> None:
    with pytest.raises(LimitError, match="below the floor"):
        steps(ABOVE(offload(limit="1MB", min_size=min_size)), 2)


@pytest.mark.parametrize("place", [BELOW, within])
def test_a_limit_where_no_step_can_be_measured_is_an_error_that_says_how_to_write_it(place) -> None:
    with pytest.raises(Exception, match=r"put @offload\(\.\.\.\) above @tf\.function"):  # AutoGraph wraps it
        steps(place(offload(limit="1GB")), 1)


class Images:
    """Convolutions, whose scratch memory the planner does not know, as an object with a step of its own."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        sizes = [(3, 3, 8 if one else 3, 8) for one in range(8)]
        self.filters = [tf.Variable(generator.normal(size=size).astype("f4") / 8) for size in sizes]
        self.images = tf.constant(generator.normal(size=(8, 128, 128, 3)).astype("f4"))
        self.resident = ResidentSet()

    def step(self, x):
        with tf.GradientTape() as tape:
            for one in self.filters:
                x = tf.nn.relu(tf.nn.conv2d(x, one, 1, "SAME"))
            loss = tf.reduce_mean(x * x)
        for one, gradient in zip(self.filters, tape.gradient(loss, self.filters), strict=True):
            one.assign_sub(0.1 * gradient)
        return loss

    def train(self, decorate) -> tuple[tuple[list, list], list[int]]:
        """Losses and weights of four steps, and the resident peak of each."""
        step, losses, peaks = decorate(type(self).step), [], []
        for _ in range(4):
            self.resident.reset_peak()
            losses.append(float(step(self, self.images)))
            peaks.append(self.resident.peak())
        return (losses, [one.numpy() for one in self.filters]), peaks


def keep_limits() -> list[str]:
    """Train under two limits; what was accepted and not kept."""
    faults: list[str] = []
    for share in (0.5, 0.8):  # of what swapping saves
        (_, least), (plain, most) = Images().train(ABOVE(offload(budget=0))), Images().train(tf.function)
        limit = int(max(least) + share * (max(most) - max(least)))
        decorator = offload(limit=limit)
        ours, peaks = Images().train(ABOVE(decorator))
        tried, planned = decorator.traces
        if not (same(ours, plain) and max(peaks) <= limit and tried.swapped > planned.swapped):
            faults.append(f"{share}: {peaks} with a limit of {limit}, plain {most}, at least {least}")
    return faults


@pytest.mark.timeout(600)
def test_no_step_goes_over_a_limit_that_was_accepted() -> None:
    # A process of its own: what memory other tests have left behind changes from step to step.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert not pool.apply(keep_limits)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": "120%"}, "at most 100%"),
        ({"limit": "1GB", "frac": 0.5}, "at most one"),
        ({"sync_mode": 4}, "sync_mode=4"),
        ({"swapin_ahead": -2}, "swapin_ahead=-2"),
        ({"swapin_groupby": -2}, "swapin_groupby=-2"),
        ({"swapin_ahed": 2}, "'swapin_ahed' is no option"),
    ],
)
def test_a_wrong_option_is_named(options, words) -> None:
    with pytest.raises(UsageError, match=words):
        offload(**options)


def test_an_eager_call_and_a_compiled_function_are_refused() -> None:
    with pytest.raises(UsageError, match="runs eagerly"):
        offload(budget=0)(lambda: tf.constant(1.0))()
    ours, xla = offload(budget=0), functools.partial(tf.function, jit_compile=True)
    for function in (xla(ours(lambda x: x + 1.0)), ours(xla(lambda x: x + 1.0))):
        with pytest.raises(Exception, match="jit_compile=False"):  # AutoGraph wraps it
            function(tf.constant(1.0))


def test_operations_that_are_not_built_are_an_error_that_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "library_path", lambda *_: tiers.Path("/nowhere.so"))
    tiers.load_operations.cache_clear()
    with pytest.raises(LMSError, match=r"python -m lms\.build tensorflow"):
        offload(budget=0)


def test_a_version_outside_the_range_is_a_warning() -> None:
    with pytest.warns(RuntimeWarning, match=r"this is 3\.0\.1"):
        _check_version("3.0.1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _check_version(tf.__version__)


def test_a_handle_still_tells_the_shape_of_its_variable() -> None:
    variable = tf.Variable(tf.zeros((3, 5)))

    @tf.function
    def read() -> tf.Tensor:
        return variable + 1.0

    graph = read.get_concrete_function().graph
    assert [[size.size for size in _content(inner).shape.dim] for _, inner in graph.captures] == [[3, 5]]


def test_planning_and_rewriting_take_at_most_2_seconds_for_5000_operations() -> None:
    def trace():
        decorator = offload(budget="30%", min_size=1000)

        @decorator
        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x
                for _ in range(1260):
                    y = tf.tanh(y) * 1.01
                loss = tf.reduce_sum(y)
            return tape.gradient(loss, x)

        step(tf.ones((64, 64)))
        (traced,) = decorator.traces
        assert traced.operations > 5000
        assert traced.swapped > 100
        return traced.seconds

    # 0.9 s of a processor at 2.5 GHz; neighbours slow it down, so the best of three counts.
    assert min(trace() for _ in range(3)) < 2


def test_a_model_is_left_as_it_was() -> None:
    model = compiled(cnn)
    fit(model, [LMS(budget="35%")])
    assert "train_step" not in model.__dict__
    fit(model, [])


def test_a_model_that_runs_eagerly_or_is_compiled_is_refused() -> None:
    with pytest.raises(UsageError, match="run_eagerly=False"):
        fit(compiled(cnn, run_eagerly=True), [LMS(budget="35%")])
    with pytest.raises(UsageError, match="jit_compile=False"):
        fit(compiled(cnn, jit_compile=True), [LMS(budget="35%")])


def test_a_plan_that_was_undone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = LMS(budget="35%")
    real = tiers.usage
    monkeypatch.setattr("lms.tensorflow.decorator.usage", lambda: {**real(), "ins": 0})
    with pytest.raises(LMSError, match="undid the plan"):
        fit(compiled(cnn), [callback])


def test_a_step_that_goes_over_the_limit_is_planned_again_and_the_bits_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    callback, peaks = LMS(limit="4GB"), iter([4_001_000_000])
    monkeypatch.setattr(callback.offload._resident, "peak", lambda: next(peaks, 1_000_000_000))
    monkeypatch.setattr(ResidentSet, "current", lambda self: 600_000_000)
    ours = fit(compiled(cnn), [callback])
    plain, tried, planned = callback.offload.traces
    assert (plain.swapped, planned.swapped) == (0, 0)
    assert tried.swapped > 0
    assert same(ours, fit(compiled(cnn), []))


def test_a_limit_that_the_step_cannot_keep_is_refused_before_the_second_step() -> None:
    with pytest.raises(LimitError, match="below the floor"):
        fit(compiled(cnn), [LMS(limit="100MB")])
