"""ddl.tensorflow and ddl.keras, on several ranks over TCP."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("tensorflow", reason="no TensorFlow")

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_collectives_do_what_numpy_does_and_gradients_flow_through_them(tcp_ranks: Run) -> None:
    done = tcp_ranks(3, "tensorflow_calls.py", timeout=110)
    assert done.stdout.count("all right") == 3, done.stdout


def test_so_they_do_without_operations_of_their_own_which_is_said(tcp_ranks: Run) -> None:
    done = tcp_ranks(2, "tensorflow_calls.py", "numpy_function", timeout=110)
    assert done.stdout.count("all right") == 2, done.stdout
    assert done.stdout.count("go through tf.numpy_function, because DDL's own operations are not built") == 1


@pytest.mark.timeout(300)
def test_fit_has_the_losses_of_one_process_and_the_same_bits_on_all_ranks(tcp_ranks: Run) -> None:
    done = tcp_ranks(4, "tensorflow_keras.py", timeout=280)
    assert done.stdout.count("all right") == 4, done.stdout


SCRIPT = """
import sys, time
import keras, numpy as np
import ddl.keras as ddl

ddl.init()
rank = ddl.rank()
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense({width}), keras.layers.Dense(1)])
model.compile({optimizer}, "mse")
data = np.ones(({rows}, 3)) * (rank + 1), np.ones(({rows}, 1))
callbacks = [ddl.DDLCallback(), ddl.DDLGlobalVariablesCallback(), {callback}]
model.fit(*data, batch_size=2, epochs=2, verbose=0, callbacks=callbacks)
print("trained")
"""
STOP = "keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batch == 1 and rank == 1 and {})"
WRAPPED = "ddl.DistributedOptimizer(keras.optimizers.SGD(0.01))"


def script(folder: Path, **parts: str) -> str:
    text = SCRIPT.format(**{"width": "4", "rows": "8", "optimizer": WRAPPED, "callback": ""} | parts)
    (folder / "script.py").write_text(text)
    return str(folder / "script.py")


@pytest.mark.parametrize("callbacks", [True, False])
def test_different_models_are_named_on_every_rank(tcp_ranks: Run, tmp_path: Path, callbacks: bool) -> None:
    path = Path(script(tmp_path, width="4 + rank"))
    if not callbacks:
        path.write_text(path.read_text().replace("ddl.DDLGlobalVariablesCallback(),", ""))
    done = tcp_ranks(2, str(path), timeout=110)
    assert done.returncode != 0
    assert "trained" not in done.stdout
    words = r"rank 0 and rank 1 train different models: .* on rank 0 is .*\(3, 4\).* on rank 1 is .*\(3, 5\)"
    assert len(re.findall(words, done.stdout)) >= 2, done.stdout


def test_different_numbers_of_batches_are_named(tcp_ranks: Run, tmp_path: Path) -> None:
    done = tcp_ranks(2, script(tmp_path, rows="8 + 2 * rank"), timeout=110)
    assert done.returncode != 0
    assert "rank 0 has 4 batches an epoch, but rank 1 has 5" in done.stdout, done.stdout


def test_a_rank_that_stops_inside_fit_is_named_in_time(tcp_ranks: Run, tmp_path: Path) -> None:
    done = tcp_ranks(2, script(tmp_path, callback=STOP.format("sys.exit(3)")), timeout=110)
    assert "trained" not in done.stdout
    words = "rank 0 called allreduce 'gradients of optimizer 0, bucket 1 of one_step_on_data'"
    assert words in done.stdout, done.stdout
    assert "rank 1 (host " in done.stdout, done.stdout


def test_a_rank_that_is_late_inside_fit_is_named_in_time(tcp_ranks: Run, tmp_path: Path) -> None:
    done = tcp_ranks(2, script(tmp_path, callback=STOP.format("time.sleep(8)")), timeout=110, DDL_TIMEOUT="3")
    assert done.returncode != 0
    assert "has waited 3 s: rank 1" in done.stdout, done.stdout


def test_a_loss_scaler_around_the_optimizer_is_refused(tcp_ranks: Run, tmp_path: Path) -> None:
    outside = f"keras.optimizers.LossScaleOptimizer({WRAPPED})"
    done = tcp_ranks(2, script(tmp_path, optimizer=outside), timeout=110)
    assert "pass DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))" in done.stdout, done.stdout


def test_the_same_data_on_all_ranks_is_said(tcp_ranks: Run, tmp_path: Path) -> None:
    path = Path(script(tmp_path))
    path.write_text(path.read_text().replace("* (rank + 1)", ""))
    done = tcp_ranks(2, str(path), timeout=110)
    assert done.returncode == 0, done.stdout
    assert "all 2 ranks have the same loss in the first batch" in done.stdout


def test_xla_is_switched_off(tcp_ranks: Run, tmp_path: Path) -> None:
    path = Path(script(tmp_path))
    path.write_text(path.read_text().replace('"mse")', '"mse", jit_compile=True)'))
    done = tcp_ranks(2, str(path), timeout=110)
    assert done.stdout.count("trained") == 2, done.stdout
    assert done.stdout.count("XLA is off for this model") == 1
