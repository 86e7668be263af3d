"""A rank's figures beside the training, for TensorBoard and Prometheus. bascule-lms has the sampler and the page."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ddl import job
from ddl.errors import ArgumentError, DDLError, UnsupportedError
from ddl.figures import stats

if TYPE_CHECKING:
    from lms.metrics import Outputs, Watch
    from lms.metrics.families import Figure

# ddlrun's options --tensorboard, --metrics-port and --metrics-address.
VARIABLES = {
    "tensorboard": "DDL_TENSORBOARD",
    "metrics_port": "DDL_METRICS_PORT",
    "metrics_address": "DDL_METRICS_ADDRESS",
}

_watch: Watch | None = None
_outputs: Outputs | None = None
_began = 0.0


def watch(
    *,
    tensorboard: str | os.PathLike[str] | None = None,
    metrics_port: int | None = None,
    metrics_address: str | None = None,
) -> None:
    """Have this rank's figures sampled once a second until `finalize`, by a thread beside the training.

    `tensorboard` is a folder for event files, in which each rank has a folder of its own. `metrics_port` is a TCP port
    for Prometheus, which the ranks of a host share, at the IP address `metrics_address` (127.0.0.1 by default). `init`
    calls this in ranks of `ddlrun --tensorboard DIR --metrics-port N`.

    A taken port or a full disk is a warning. Raises ArgumentError (a wrong argument, or neither folder nor port),
    UnsupportedError (bascule-lms, or prometheus_client for a port, is not installed), StateError before `init`.
    """
    _start({"tensorboard": tensorboard, "metrics_port": metrics_port, "metrics_address": metrics_address})


def from_environment(environ: Mapping[str, str]) -> None:
    """Watch as ddlrun's variables ask; what is wrong with them is a warning."""
    given = {name: environ.get(variable) or None for name, variable in VARIABLES.items()}
    if not (given["tensorboard"] or given["metrics_port"]):
        return
    try:
        _start(given)
    except DDLError as error:
        if job.local_rank() == 0:
            print(f"ddl: warning: no figures are sampled: {error}", file=sys.stderr)


def renew() -> None:
    """After `resize` or `shrink`: this rank may have another number, and its figures begin anew."""
    if _watch is not None:
        _sample(job.rank())


def end() -> None:
    """Sample a last time and print the advice that the figures support. Does nothing if nobody watches."""
    global _watch
    watched, _watch = _watch, None
    if watched is None:
        return
    from ddl.advice import advice

    watched.close()
    if not job.is_initialized():
        return
    for one in advice(stats(), time.monotonic() - _began):
        print(f"ddl: rank {job.rank()}: advice: {one.text}", file=sys.stderr, flush=True)


def _start(given: Mapping[str, Any]) -> None:
    global _outputs
    try:
        from lms.errors import UsageError
        from lms.metrics import Outputs
        from lms.options import Options
    except ImportError as error:
        raise UnsupportedError(
            f"figures of a rank need bascule-lms, which is not installed ({error}): "
            "pip install './ddl[metrics]' in a copy of the repository"
        ) from None
    rank = job.rank()  # raises StateError
    try:
        options = Options.parse(prefix="", environ={}, **given)
    except UsageError as error:
        raise ArgumentError(f"ddl.watch: {error}") from None
    outputs = Outputs(options.tensorboard, options.metrics_port, options.metrics_address)
    if not outputs:
        raise ArgumentError("ddl.watch: give tensorboard, metrics_port or both")
    try:
        outputs.check()
    except UsageError as error:
        raise UnsupportedError(f"ddl.watch: {error}") from None
    end()
    _outputs = outputs
    _sample(rank if job.size() > 1 else None)


def _sample(rank: int | None) -> None:
    global _watch, _began
    from lms.metrics import watch as sample

    assert _outputs is not None
    _began = time.monotonic()
    _watch = sample("ddl", partial(_figures, job.epoch()), _outputs, rank)


def _figures(epoch: int) -> Mapping[str, Figure]:
    """For the sampler's thread. Nothing if `epoch` has ended: this rank may have another number now."""
    from ddl.advice import advice
    from lms.advice import as_figure

    try:
        found, ranks = stats(), job.size()
        if job.epoch() != epoch:
            return {}
    except DDLError:
        return {}
    return {
        "ranks": ranks,
        "calls": found.calls,
        "bytes": found.bytes,
        "timed": found.timed,
        "seconds": found.seconds,
        "least_seconds": found.least_seconds,
        "bound": found.bound,
        "waited": {(str(rank),): seconds for rank, seconds in found.waited.items()},
        "late": {(str(rank),): float(calls) for rank, calls in found.late.items()},
        "advice": as_figure(advice(found, time.monotonic() - _began)),
    }
