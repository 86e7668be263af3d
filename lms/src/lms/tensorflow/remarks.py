"""What a user is told of a step: what of it stays, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import tensorflow as tf

from lms.tensorflow.bounds import Bounds
from lms.tensorflow.graph import Node
from lms.tensorflow.step import Step
from lms.tensorflow.swaps import Swaps
from lms.tensorflow.traced import CALLS, Known
from lms.units import format_size

_CLUSTERS = {"XlaLaunch", "_XlaRun"}  # each runs many operations that XLA has compiled
_OWN_NAME = re.compile("^__inference___backward_(.+)_[0-9]+_[0-9]+$|^__[a-z]+_(.+)_[0-9]+$")  # of a traced function


def called(nodes: Sequence[Node], prefix: str, known: Known) -> dict[str, int]:
    """The functions that are still called in an optimized graph, and the bytes that they make inside."""
    found: dict[str, int] = {}
    for node in nodes:
        call = node.name.removeprefix(prefix)
        if node.op in CALLS and node.name.startswith(prefix) and call in known.calls:
            name = _OWN_NAME.sub(r"\1\2", known.calls[call])
            inside = (made for one, made in known.outputs.items() if one.startswith(f"{call}/"))
            found[name] = found.get(name, 0) + sum(one.nbytes or 0 for made in inside for one in made)
    return found


def other_devices(known: Known, device: str) -> dict[str, int]:
    """Other devices that the script has tensors of the step made on, and the bytes."""
    own, found = _short(device), dict[str, int]()
    for other, nbytes in known.devices.items():
        name = _short(other)
        if nbytes and name not in (own, ""):
            found[name] = found.get(name, 0) + nbytes
    return found


def _short(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type}:{spec.device_index or 0}" if spec.device_type else ""


def what_stays(stays: Mapping[str, int], elsewhere: Mapping[str, int]) -> list[str]:
    """A remark on the functions that are called, and one on the tensors of other devices, if there are some."""
    remarks = []
    if stays:
        remarks.append(
            "memory inside of these functions stays as it is, because TensorFlow runs each on its own (it has "
            f"jit_compile=True, for example): {_listed(stays)}"
        )
    if elsewhere:
        remarks.append(
            f"tensors on these devices stay: {_listed(elsewhere)}. LMS swaps those of one device; with several "
            "replicas, give offload the function that each replica runs"
        )
    return remarks


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({format_size(nbytes)})" for name, nbytes in sorted(sizes.items()))


def in_clusters(nodes: Sequence[Node]) -> str:
    """A warning if XLA has compiled parts of the step, else ""."""
    clusters = sum(node.op in _CLUSTERS for node in nodes)
    if not clusters:
        return ""
    return (
        f"XLA has compiled {clusters} parts of the step, and LMS swaps nothing inside: leave "
        "auto-clustering off (tf.config.optimizer.set_jit(False), no --tf_xla_auto_jit in TF_XLA_FLAGS)"
    )


def nothing_moves(
    bounds: Bounds, step: Step, swaps: Swaps, known: Known, stays: Mapping[str, int], *, on_device: bool
) -> str:
    """A warning if no tensor was chosen and the bound may be missed for that, else ""."""
    if swaps.outs or bounds.is_all:
        return ""
    limit, budget = bounds.of(step.trace)
    taken = max(step.trace.live, default=swaps.peak - step.base)
    if known.unknown > len(step.tensors):
        why = (
            f"the sizes of {known.unknown} are not known while tracing; give tensors of a fixed batch "
            "(drop_remainder=True, or an input_signature with sizes)"
        )
    elif limit is not None and not on_device:
        return ""  # the step is measured
    elif known.untouched or stays:
        named = ", ".join([*sorted(known.untouched), *sorted(stays)])
        why = f"what is inside of these cannot move: {named}; make the batch smaller, or write it without them"
    elif budget is not None and taken > budget:
        why = (
            f"the step's tensors take {format_size(taken)}, and no copy would lower that; make the batch, min_size "
            "or swapout_threshold smaller"
        )
    else:
        return ""
    bound = f"limit of {format_size(limit)}" if limit is not None else f"budget of {format_size(budget or 0)}"
    return f"LMS chose no tensor, so the {bound} may not be kept: {why}"
