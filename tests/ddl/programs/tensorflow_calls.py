"""Collectives of TensorFlow's tensors, compared with NumPy: eagerly and in a tf.function, and their gradients.

With "numpy_function" as its argument it works without DDL's own operations.
"""

from __future__ import annotations

import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
import ddl.horovod.tensorflow as hvd
from ddl.tensorflow import operations

if sys.argv[1:] == ["numpy_function"]:
    operations.library = lambda: None
else:
    assert operations.library() is not None, "run `python -m ddl.build tensorflow`"
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
TYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint8")
NATIVE = operations.library() is not None


def of(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.random.default_rng([rank, *shape]).integers(0, 3, shape).astype(tf.as_dtype(dtype).as_numpy_dtype)


def both(function, *tensors):
    """The results eagerly, and those in a tf.function, twice."""
    eager = tf.nest.flatten(function(*tensors))
    traced = tf.function(function)
    for _ in range(2):
        for one, other in zip(eager, tf.nest.flatten(traced(*tensors)), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one.numpy(), other.numpy())
    return [its.numpy() for its in eager]


def reductions() -> None:
    functions = {hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}
    for dtype in TYPES:
        for shape in ((), (0,), (3, 7)):
            every = np.stack([of(rank, shape, dtype) for rank in range(SIZE)])
            mine = tf.constant(every[RANK])
            for op, function in functions.items():
                (result,) = both(lambda its, op=op: hvd.allreduce(its, op=op), mine)
                np.testing.assert_array_equal(result, function(every.astype("f8"), 0).astype(result.dtype))
            (result,) = both(hvd.allreduce, mine)
            whole = every.astype("f8").mean(0)
            whole = whole if mine.dtype.is_floating else np.trunc(whole)
            np.testing.assert_allclose(result.astype("f8"), whole, 1e-2)
            np.testing.assert_array_equal(mine.numpy(), every[RANK])
        every = np.stack([of(rank, (SIZE + 1, 2), dtype) for rank in range(SIZE)])
        (result,) = both(lambda its: hvd.reducescatter(its, op=hvd.Sum), tf.constant(every[RANK]))
        np.testing.assert_array_equal(
            result, np.array_split(every.astype("f8").sum(0), SIZE)[RANK].astype(result.dtype)
        )
    scaled = hvd.allreduce(tf.constant([6, 7]), op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0)
    assert scaled.numpy().tolist() == [6 * SIZE] * 2
    half = hvd.allreduce(tf.constant([1.0 + RANK]), op=hvd.Sum, compression=hvd.Compression.fp16)
    assert (half.dtype, float(half[0])) == (tf.float32, SIZE * (SIZE + 1) / 2)


def movements() -> None:
    for dtype in (*TYPES, "bool", "uint16", "complex64"):
        every = [of(rank, (rank + 1, 3), dtype) for rank in range(SIZE)]
        (result,) = both(hvd.allgather, tf.constant(every[RANK]))
        np.testing.assert_array_equal(result, np.concatenate(every))
        for root in range(SIZE):
            (result,) = both(lambda its, root=root: hvd.broadcast(its, root), tf.constant(of(RANK, (4, 2), dtype)))
            np.testing.assert_array_equal(result, of(root, (4, 2), dtype))
        every = [of(rank, (SIZE, 2), dtype) for rank in range(SIZE)]
        (result,) = both(hvd.alltoall, tf.constant(every[RANK]))
        np.testing.assert_array_equal(result, np.stack([its[RANK] for its in every]))
    splits = tf.range(SIZE)
    result, rows = both(hvd.alltoall, tf.repeat(tf.range(SIZE), splits), splits)
    assert (result.tolist(), rows.tolist()) == ([RANK] * RANK * SIZE, [RANK] * SIZE)
    group = [tf.constant([1.0 + RANK]), tf.constant([[RANK]]), tf.zeros([0])]
    sums = both(lambda *its: hvd.grouped_allreduce(its, op=hvd.Sum, name="group"), *group)
    assert [its.tolist() for its in sums] == [[SIZE * (SIZE + 1) / 2], [[SIZE * (SIZE - 1) // 2]], []]


def gradients() -> None:
    """On Horovod's scale. All ranks' upstream gradients have the rank in them."""
    x = tf.constant(np.arange(2.0 * SIZE).reshape(SIZE, 2) + RANK)

    def of_call(call):
        def gradient(its):
            with tf.GradientTape() as tape:
                tape.watch(its)
                result = call(its)
                loss = tf.reduce_sum(result * (RANK + 1.0))
            return tape.gradient(loss, its)

        return both(gradient, x)[0]

    mean, total = (SIZE + 1) / 2, SIZE * (SIZE + 1) / 2
    ones = np.ones((SIZE, 2))
    np.testing.assert_allclose(of_call(hvd.allreduce), ones * mean)
    np.testing.assert_allclose(of_call(lambda its: hvd.allreduce(its, op=hvd.Sum)), ones * total)
    np.testing.assert_allclose(
        of_call(lambda its: hvd.allreduce(its, op=hvd.Sum, prescale_factor=2.0)), ones * 2 * total
    )
    np.testing.assert_allclose(of_call(hvd.allgather), ones * mean)
    np.testing.assert_allclose(
        of_call(lambda its: hvd.broadcast(its, SIZE - 1)), ones * (mean if RANK == SIZE - 1 else 0)
    )
    np.testing.assert_allclose(of_call(hvd.alltoall), ones * np.arange(1, SIZE + 1)[:, None])
    np.testing.assert_allclose(of_call(hvd.reducescatter), ones * np.arange(1, SIZE + 1)[:, None])
    with tf.GradientTape() as tape:
        tape.watch(x)
        largest = hvd.allreduce(x, op=hvd.Max)
    with pytest.raises(RuntimeError, match="no gradient flows through a reduction by Max"):
        tape.gradient(largest, x)


def graphs() -> None:
    """Calls that nobody uses, in loops, in branches, at once, and of graphs of TensorFlow 1."""

    @tf.function
    def busy(x):
        hvd.allreduce(x)  # the other ranks wait for it, whoever uses it
        total = tf.zeros_like(x)
        for step in tf.range(3):
            total += hvd.allreduce(x + tf.cast(step, x.dtype), op=hvd.Sum)
        if SIZE > 0:
            total = tf.cond(tf.reduce_sum(x) > -1.0, lambda: hvd.broadcast(total, 0), lambda: total)
        return total

    assert busy(tf.constant([1.0])).numpy().tolist() == [6.0 * SIZE]

    @tf.function
    def constants():
        return hvd.allreduce(tf.constant([2.0 + RANK]), op=hvd.Max), hvd.allreduce(tf.constant([1.0]), op=hvd.Sum)

    for _ in range(3):
        largest, count = constants()
        assert (float(largest[0]), float(count[0])) == (1.0 + SIZE, SIZE)

    @tf.function
    def by_name(x):
        for number in np.random.default_rng(RANK).permutation(10):
            x += hvd.allreduce(tf.constant([float(number)]), name=f"number {number}", op=hvd.Sum)
        return x

    if NATIVE:  # tf.numpy_function makes calls in the order in which they were traced
        assert by_name(tf.constant([0.0])).numpy().tolist() == [45.0 * SIZE]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", initializer=tf.constant([1.0 + RANK]))
        mean = hvd.allreduce(variable)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(hvd.broadcast_global_variables(SIZE - 1))
        assert session.run(mean).tolist() == [SIZE]
        if NATIVE:  # tf.numpy_function has lost its functions once its graph is gone
            optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0))
            step = optimizer.minimize(tf.reduce_sum(variable * (RANK + 1.0)))
            session.run(step)
            assert session.run(variable).tolist() == [SIZE - (SIZE + 1) / 2]


def at_once() -> None:
    """Steps and calls of functions that run at the same time, in another order on each rank, find their own."""

    def stepping(gradient, function):
        variable = tf.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
        optimizer.build([variable])

        @function
        def step(factor):
            optimizer.apply([factor * -gradient], [variable])

        return variable, step

    def by_tape(gradient):
        variable = tf.Variable([0.0])

        @tf.function
        def step(factor):
            with tf.GradientTape() as tape:
                loss = variable * gradient * factor
            tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
            variable.assign_add(tape.gradient(loss, variable))

        return variable, step

    def calling(gradient, function):
        variable = tf.Variable([0.0])

        def step(factor):
            variable.assign_add(hvd.allreduce(factor * gradient, op=hvd.Sum))

        step.__name__ = f"step_by_{gradient:.0f}"
        return variable, function(step)

    def eagerly(function):
        return function

    kinds = (
        [stepping(1.0, tf.function), stepping(100.0, tf.function)],
        [stepping(1.0, eagerly), stepping(100.0, eagerly)],
        [by_tape(1.0), by_tape(100.0)],
        [calling(1.0, tf.function), calling(100.0, tf.function)],
    )
    for pair in kinds:
        for _, step in pair:
            step(tf.ones([1]))
        for turn in range(10):
            threads = [threading.Thread(target=step, args=(tf.ones([1]),)) for _, step in pair]
            for thread in threads if (RANK + turn) % 2 else reversed(threads):
                thread.start()
            for thread in threads:
                thread.join()
        assert [float(its[0]) for its, _ in pair] == [11.0 * SIZE, 1100.0 * SIZE], pair


def retraced() -> None:
    """A rank that traces a function more often than the others has the same names."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    variable = tf.Variable([0.0])
    optimizer.build([variable])

    @tf.function
    def step(rows):
        gradient = tf.zeros([1])
        for _ in tf.range(2):
            if tf.reduce_sum(rows) > 0:
                gradient += hvd.allreduce(tf.ones([1]), op=hvd.Sum)
            else:
                gradient += hvd.allreduce(tf.zeros([1]), op=hvd.Sum)
        optimizer.apply([-gradient], [variable])

    for turn in range(3):
        step(tf.ones([1 + turn * RANK]) if RANK or turn else tf.zeros([1]))
    assert variable.numpy().tolist() == [2.0 * SIZE * (3 * SIZE - 1)]


def memory() -> None:
    """What nobody else reads is reduced in place, and what others read is left alone."""

    @tf.function
    def kept(x):
        y = x * 2.0
        total = hvd.allreduce(y, op=hvd.Sum)
        return y, total

    y, total = kept(tf.constant([1.0 + RANK] * 1000))
    assert set(y.numpy()) == {2.0 + 2 * RANK}
    assert set(total.numpy()) == {float(SIZE * (SIZE + 1))}
    variable = tf.Variable([1.0 + RANK] * 1000)
    hvd.allreduce(variable)
    assert set(variable.numpy()) == {1.0 + RANK}


def sparse() -> None:
    slices = tf.IndexedSlices(tf.constant([[1.0 + RANK]] * 2), tf.constant([0, RANK + 1]), tf.constant([SIZE + 1, 1]))
    total = np.zeros((SIZE + 1, 1))
    for rank in range(SIZE):
        total[[0, rank + 1]] += 1.0 + rank
    for result in (hvd.allreduce(slices, op=hvd.Sum), hvd.grouped_allreduce([slices, tf.ones(1)], op=hvd.Sum)[0]):
        np.testing.assert_allclose(tf.convert_to_tensor(result), total)
    np.testing.assert_allclose(tf.convert_to_tensor(hvd.allreduce(slices)), total / SIZE)


def tapes() -> None:
    weight, table = tf.Variable([[2.0]]), tf.Variable(tf.ones([4, 1]))

    @tf.function
    def gradients(x, index):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * x) + tf.reduce_sum(tf.gather(table, index))
        its = hvd.DistributedGradientTape(tape)
        found = its.gradient(loss, {"w": weight, "t": table})
        return found["w"], tf.convert_to_tensor(found["t"])

    w, t = gradients(tf.constant([[1.0 + RANK]]), tf.constant([0, 0, 3]))
    assert float(w[0, 0]) == (SIZE + 1) / 2
    assert t.numpy().ravel().tolist() == [2, 0, 0, 1]
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True), op=hvd.Sum) as tape:
        loss = weight * (1.0 + RANK)
    assert tape.gradient(loss, [weight])[0].numpy().tolist() == [[SIZE * (SIZE + 1) / 2]]
    tape.register_local_source(weight)
    np.testing.assert_allclose(tape.gradient(loss, [weight])[0], [[(1 + RANK) / SIZE]], 1e-6)


def errors() -> None:
    expected = tf.errors.FailedPreconditionError if NATIVE else ddl.MismatchError
    with pytest.raises(expected, match=r"rank 0 called .*float32 of shape \(3,\)"):
        hvd.allreduce(tf.zeros([2 + (RANK > 0)]))

    @tf.function
    def traced(x):
        return hvd.broadcast(x, RANK)

    with pytest.raises(tf.errors.OpError, match="root 0"):
        traced(tf.ones([1]))
    with pytest.raises(ddl.UnsupportedError, match=r"broadcast of a tensor of strings: .* broadcast_object"):
        hvd.broadcast(tf.constant(["a"]), 0)
    assert hvd.allreduce(tf.ones([1]), op=hvd.Sum).numpy().tolist() == [SIZE]


def sets() -> None:
    others = hvd.add_process_set(list(range(1, SIZE)))
    if others.included():
        assert hvd.allreduce(tf.constant([1.0 + RANK]), process_set=others).numpy().tolist() == [(SIZE + 2) / 2]
    else:
        with pytest.raises(ValueError, match="is not in ProcessSet"):
            hvd.allreduce(tf.ones(1), process_set=others)
    hvd.remove_process_set(others)
    things = hvd.allgather_object({"rank": RANK})
    assert things == [{"rank": rank} for rank in range(SIZE)]
    assert hvd.broadcast_object({"of": RANK}, SIZE - 1) == {"of": SIZE - 1}
    variables = [tf.Variable([1.0 + RANK]), tf.Variable(RANK)]
    hvd.broadcast_variables(variables, 0)
    assert [its.numpy().tolist() for its in variables] == [[1.0], 0]
    assert int(hvd.rank_op()) == RANK
    assert int(hvd.size_op()) == SIZE
    # Ranks that have run out of data.
    for _ in range(RANK):
        hvd.allreduce(tf.ones(2))
    assert hvd.join() == SIZE - 1


for part in (reductions, movements, gradients, graphs, at_once, retraced, memory, sparse, tapes, errors, sets):
    part()
hvd.shutdown()
print(f"rank {RANK}: all right")
