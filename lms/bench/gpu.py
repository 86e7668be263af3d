"""Measure LMS on a GPU whose memory is capped: `python lms/bench/gpu.py`. docs/benchmarks.md says what and how.

Each model trains plainly on the whole GPU, with batches that need twice and four times the cap, then under the cap: by
LMS, and by what its users would do without it. Then the largest image or volume that trains under a cap is looked for,
plain and with LMS. Each model has a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from models import Job, checkpoint_blocks, gpt, resnet, unet
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from lms.core.plan import floor
from lms.errors import LMSError
from lms.memory.machine import machine
from lms.torch.session import Session
from lms.units import format_size, parse_size

GPU = torch.device("cuda")
STEPS, LMS_STEPS, LAST = 10, 13, 3  # of a cell; the last ones are timed, by when LMS has made its last plan
USABLE = 0.9  # of the cap is LMS's limit: it counts what the allocator gave out, and the cap what it has reserved
PIECE = 1 << 24  # bytes that are hashed at once
Built = tuple[Job, torch.optim.Optimizer]
Found = dict[str, Any]  # what was measured, as it stands in the file


def resnet50(batch: int, sides: Sequence[int] = (224, 224)) -> Built:
    """ResNet-50 in float32, with SGD."""
    job = resnet((batch, sides, 64, (3, 4, 6, 3)), GPU)
    return job, torch.optim.SGD(job.model.parameters(), 1e-4, momentum=0.9)


def unet3d(batch: int, sides: Sequence[int] = (128, 128, 128)) -> Built:
    """The brain example's 3D U-Net, 32 channels wide, in float32, with SGD."""
    job = unet((32, sides), GPU, batch)
    return job, torch.optim.SGD(job.model.parameters(), 1e-4, momentum=0.9)


def gpt1b(batch: int) -> Built:
    """A GPT of a billion parameters in bfloat16, on sequences of 2,048, with AdamW."""
    with torch.device(GPU):
        job = gpt((batch, 2048, 32768, 2048, 16, 19), GPU, torch.bfloat16)
    return job, torch.optim.AdamW(job.model.parameters(), 1e-4)


def deeplab(batch: int, sides: Sequence[int]) -> Built:
    """DeepLabV3 on a ResNet-50, of torchvision."""
    from torchvision.models.segmentation import deeplabv3_resnet50

    model = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21).to(GPU)
    image = torch.randn(max(batch, 2), 3, *sides, device=GPU)  # its BatchNorm over one pixel needs two images
    truth = torch.randint(21, (len(image), *sides), device=GPU)
    job = Job(model, lambda: functional.cross_entropy(model(image)["out"], truth), ())
    return job, torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)


# What is swapped, and the batches that show how memory grows.
CAPPED: dict[str, tuple[Callable[[int], Built], tuple[str, ...], tuple[int, int]]] = {
    "resnet50": (resnet50, ("activations",), (16, 48)),
    "unet3d": (unet3d, ("activations",), (1, 3)),
    "gpt1b": (gpt1b, ("activations", "optimizer"), (2, 5)),
}
# How many sides there are, the step between lengths of a side, and two lengths that show how memory grows.
LARGEST: dict[str, tuple[Callable[[int, Sequence[int]], Built], int, int, tuple[int, int]]] = {
    "unet3d": (unet3d, 3, 16, (96, 128)),
    "resnet50": (resnet50, 2, 32, (512, 1024)),
    "deeplabv3": (deeplab, 2, 32, (256, 512)),
}


@contextmanager
def capped(cap: int | None) -> Iterator[None]:
    """Cap what the allocator may reserve of the GPU; None: nothing."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()  # pinned memory of the cell before
    total = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total) if cap else 1.0)
    torch.cuda.reset_peak_memory_stats()
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def peak_of(build: Callable[[], Built]) -> int:
    """The most bytes of two plain steps."""
    with capped(None):
        job, optimizer = build()
        for _ in range(2):
            train_step(job, optimizer)
        return torch.cuda.max_memory_allocated()


def train_step(job: Job, optimizer: torch.optim.Optimizer, around: Callable[[], Any] = nullcontext) -> float:
    """One step, with its forward inside `around`; its loss."""
    optimizer.zero_grad()
    with around():
        loss = job.loss()
    loss.backward()
    optimizer.step()
    return float(loss.item())


def offload() -> Any:
    """The activation offload of trl, which is torchtune's, further developed: on streams of its own."""
    from trl.models.activation_offloading import OffloadActivations

    return OffloadActivations(use_pin_memory=True, use_streams=True)


def with_fsdp(job: Job, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """FSDP2 with CPU offload on one rank: parameters, gradients and optimizer state in host memory."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    if not dist.is_initialized():
        address = "tcp://127.0.0.1:0"
        dist.init_process_group("cuda:nccl,cpu:gloo", init_method=address, rank=0, world_size=1)
    policy = CPUOffloadPolicy(pin_memory=True)
    for module in [*(one for one in job.model.modules() if isinstance(one, job.blocks)), job.model]:
        fully_shard(module, offload_policy=policy)
    return torch.optim.AdamW(job.model.parameters(), optimizer.defaults["lr"])


def cell(build: Callable[[], Built], kind: str, cap: int | None, swap: tuple[str, ...], out: Path) -> Found:
    """Train one way and measure it; `failed` says why not."""
    found: Found = {}
    session: Session | None = None
    try:
        with capped(cap):
            torch.manual_seed(20)
            job, optimizer = build()
            every_step: Callable[[], Any] = nullcontext
            if kind == "checkpoint":
                checkpoint_blocks(job)
            elif kind == "trl":
                offloading = offload()
                every_step = lambda: offloading  # noqa: E731
            elif kind == "fsdp2":
                optimizer = with_fsdp(job, optimizer)
            elif kind in ("lms", "lms+recompute"):
                session = Session(
                    job.model,
                    optimizer,
                    limit=int(USABLE * (cap or 0)),
                    swap=swap,
                    recompute=kind == "lms+recompute",
                ).open()
            stream = torch.cuda.current_stream()
            seconds: list[float] = []
            hooks: list[float] = []
            losses: list[float] = []
            for _ in range(LMS_STEPS if session is not None else STEPS):
                stream.synchronize()  # not the whole GPU: copies may go on into the next step
                began = time.perf_counter()
                losses.append(train_step(job, optimizer, every_step))
                stream.synchronize()
                seconds.append(time.perf_counter() - began)
                hooks.append(float(session.stats()["hook_time"] or 0) if session is not None else 0.0)
                if len(losses) == STEPS:
                    found["bits"] = bits(losses, job.model)
                    choice = session.plan.choice if session is not None and session.plan is not None else None
                    found["recomputed"] = len(choice.modules) if choice is not None else 0  # by then
            found |= {
                "seconds": statistics.median(seconds[-LAST:]),
                "hooks": (hooks[-1] - hooks[-1 - LAST]) / LAST,
                "all": seconds,
                "peak": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
            }
            if session is not None:
                found |= figures(session, out)
    except (torch.OutOfMemoryError, LMSError, ImportError, RuntimeError) as error:
        found["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    finally:
        if session is not None:
            session.close()
    return found


def figures(session: Session, out: Path) -> Found:
    """What LMS foresaw and what came of it; the pass is kept as a trace beside the figures."""
    stats, plan, trace = session.stats(), session.plan, session.trace
    found: Found = {name: stats[name] for name in ("saved", "peak", "host_peak", "last_out", "last_in", "misses")}
    found |= {name: stats[name] for name in ("state", "state_out", "last_stall_out", "last_stall_in")}
    found["link"], found["peak_where"] = str(session.link()), session.peak_where
    if plan is not None:
        found |= {"pass": plan.forecast.seconds, "moves": len(plan.moves)}
        found["choice"] = plan.choice.why if plan.choice is not None else ""
    if trace is not None:
        found |= {"computed": trace.seconds, "floor": floor(trace)[0], "accesses": len(trace.accesses)}
        trace.save(out)
    return found


def bits(losses: list[float], model: nn.Module) -> list[str]:
    """The losses, and one hash of sums over every gradient and parameter, after as many steps as every cell takes."""
    total = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        for one in (parameter, parameter.grad):
            if one is not None:
                one = one.to_local() if isinstance(one, DTensor) else one
                pieces = one.detach().contiguous().flatten().view(torch.uint8).split(PIECE)
                total.update(b"".join(weighted_sum(piece) for piece in pieces))
    return [*(loss.hex() for loss in losses), total.hexdigest()]


def weighted_sum(piece: torch.Tensor) -> bytes:
    """The sum of the bytes, each times its place, in integers. The device computes it, so no bytes are copied."""
    places = torch.arange(1, len(piece) + 1, device=piece.device)
    return int((piece * places).sum()).to_bytes(8, "little")


def throughput(name: str, cap: int, out: Path, kinds: Sequence[str]) -> Found:
    """All cells of one model, with batches that need twice and four times the cap."""
    build, swap, (few, more) = CAPPED[name]
    small, large = (peak_of(lambda size=size: build(size)) for size in (few, more))  # type: ignore[misc]
    slope = (large - small) / (more - few)
    found: Found = {"slope": slope, "cells": []}
    for times in (2, 4):
        batch = round((times * cap - small) / slope + few)
        for kind in kinds if times == 2 else [kind for kind in kinds if kind in AT_FOUR]:
            if kind in ("trl", "fsdp2") and "optimizer" not in swap:
                continue  # they are made for transformers, and trl takes half a minute to lock its memory
            one = cell(
                lambda batch=batch: build(batch),  # type: ignore[misc]
                kind.removesuffix("-again"),
                None if kind in UNCAPPED else cap,
                swap,
                out / f"{name}_{times}x_{kind}.trace.json",
            )
            one |= {"times": times, "batch": batch, "kind": kind}
            found["cells"].append(one)
            print(name, row(one, found["cells"]), flush=True)
    return found


def row(one: Found, cells: Sequence[Found]) -> str:
    """A cell in a line."""
    head = f"{one['times']}x batch {one['batch']:<4} {one['kind']:<14}"
    if "failed" in one:
        return f"{head} {one['failed']}"
    plain = next((each for each in cells if each["times"] == one["times"] and each["kind"] == "plain"), one)
    line = f"{head} {one['seconds']:.3f} s"
    if "seconds" in plain:
        line += f", {plain['seconds'] / one['seconds']:.3f} of plain's throughput"
        line += f", bits {'equal' if one['bits'] == plain['bits'] else 'DIFFER'}"
        line += f" with {one['recomputed']} modules recomputed" if one["recomputed"] else ""
    where = one.get("peak_where", "of all steps")
    line += f", peak {format_size(one['peak'])} ({where}), reserved {format_size(one['reserved'])}"
    if "pass" in one:
        line += f", pass foreseen {one['pass']:.3f} s, its computation {one['computed']:.3f} s"
        line += f", {format_size(one['last_out'])} out, {format_size(one['host_peak'])} on the host; {one['choice']}"
        line += f"; hooks {one['hooks']:.3f} s, stalls {one['last_stall_out']:.3f} {one['last_stall_in']:.3f} s"
    return line


def wrong(name: str, cells: Sequence[Found]) -> bool:
    """Whether LMS failed, unless nothing trains that, or gave other bits than plain although plain repeats itself."""
    bits = {(one["times"], one["kind"]): one.get("bits") for one in cells}
    again = bits.get((2, "plain-again"))
    repeats = again is None or again == bits.get((2, "plain"))
    for one in cells:
        if one["kind"] in ("lms", "lms+recompute"):
            plain = bits.get((one["times"], "plain"))
            if "failed" in one:
                if (name, one["times"]) not in TOO_LARGE:
                    return True
            elif repeats and plain not in (None, one["bits"]):
                return True
    return False


def trains(build: Callable[[], Built], cap: int, *, swapped: bool) -> Found:
    """Whether three steps run under the cap, and LMS's floor."""
    found: Found = {"trains": False}
    session: Session | None = None
    try:
        with capped(cap):
            job, optimizer = build()
            if swapped:
                session = Session(job.model, optimizer, limit=int(USABLE * cap)).open()
            began = time.perf_counter()
            for _ in range(3):
                train_step(job, optimizer)
            found = {"trains": True, "seconds": (time.perf_counter() - began) / 3}
            found["peak"] = torch.cuda.max_memory_allocated()
    except (torch.OutOfMemoryError, LMSError) as error:
        found["why"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    finally:
        if session is not None:
            trace = session.trace
            if trace is not None:
                found["floor"] = floor(trace)[0]
            stats = session.stats()
            found |= {"peak": stats["peak"], "host": stats["host_peak"]}
            session.close()
    return found


def largest(name: str, cap: int) -> Found:
    """The largest size that trains under the cap, plain and with LMS, and the share of what LMS's floor allows."""
    build, count, step, lengths = LARGEST[name]
    tried: list[Found] = []

    def sides_of(number: int) -> tuple[int, ...]:
        """Sizes by number: from each to the next, one side grows by a step."""
        whole, more = divmod(number, count)
        return tuple((whole + (at < more)) * step for at in range(count))

    def number_of(volume: float) -> int:
        """The largest size of at most that volume."""
        return next(number for number in range(1, 10_000) if math.prod(sides_of(number + 1)) > volume)

    def attempt(number: int, *, swapped: bool) -> Found:
        sides = sides_of(number)
        one = {"sides": sides, "lms": swapped, **trains(lambda: build(1, sides), cap, swapped=swapped)}
        tried.append(one)
        print(name, one, flush=True)
        return one

    def most_that_trains(number: int, *, swapped: bool) -> int:
        """The largest size that trains, from a guess up or down; 0 if none does near it."""
        if attempt(number, swapped=swapped)["trains"]:
            while attempt(number + 1, swapped=swapped)["trains"]:
                number += 1
            return number
        return next((one for one in range(number - 1, number - 6, -1) if attempt(one, swapped=swapped)["trains"]), 0)

    def allowed(needs: Sequence[tuple[float, float]], most: float) -> float:
        """The volume for which `most` bytes are enough, if the need is linear in the volume."""
        (first, least), (second, greater) = needs
        return first + (most - least) * (second - first) / max(greater - least, 1)

    needs = [(side**count, peak_of(lambda side=side: build(1, (side,) * count))) for side in lengths]  # type: ignore[misc]
    plain = most_that_trains(number_of(allowed(needs, cap)), swapped=False)
    if not plain:
        return {"tried": tried}
    volume = math.prod(sides_of(plain))
    twice = number_of(2 * volume)
    floors = [(math.prod(sides_of(one)), attempt(one, swapped=True).get("floor", 0)) for one in (plain, twice)]
    if not all(need for _, need in floors):
        return {"plain": sides_of(plain), "tried": tried}
    most = allowed(floors, USABLE * cap)
    ours = most_that_trains(number_of(most), swapped=True)
    found: Found = {"plain": sides_of(plain), "lms": sides_of(ours), "tried": tried}
    found |= {"times": math.prod(sides_of(ours)) / volume, "of the floor": math.prod(sides_of(ours)) / most}
    return found


KINDS = ("plain", "lms", "lms+recompute", "checkpoint", "trl", "fsdp2", "plain-again")
UNCAPPED = ("plain", "plain-again", "fsdp2")
TOO_LARGE = {("unet3d", 4)}  # models and times the cap that nothing trains: a single operation needs more
AT_FOUR = ("plain", "lms+recompute", "checkpoint")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 if LMS was `wrong`, or found no largest size."""
    parser = argparse.ArgumentParser(
        prog="gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cap", default="16GB", help="of the GPU's memory for throughput (default 16GB)")
    parser.add_argument("--cap-largest", default="4GB", help="of it for the largest size (default 4GB)")
    parser.add_argument("--capped", nargs="*", choices=CAPPED, default=list(CAPPED), help="models (default: all)")
    parser.add_argument("--largest", nargs="*", choices=LARGEST, default=list(LARGEST), help="models (default: all)")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="cells (default: all)")
    parser.add_argument("-o", "--output", type=Path, default=Path("out/gpu"), help="folder (default: out/gpu)")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    cap, cap_largest = parse_size(given.cap, "--cap"), parse_size(given.cap_largest, "--cap-largest")
    given.output.mkdir(parents=True, exist_ok=True)
    if given.one is not None:
        what, name = given.one
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if what == "capped":
            # A GPT has nothing that must not repeat itself; its attention repeats itself only if that is no warning.
            torch.use_deterministic_algorithms(True, warn_only=name != "gpt1b")
            # Filling costs time, and changes no result.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            found = throughput(name, cap, given.output, given.kinds)
        else:
            found = largest(name, cap_largest)
        (given.output / f"{what}_{name}.json").write_text(json.dumps(found))
        return 0
    document: Found = {"machine": machine(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    document |= {"cap": cap, "cap_largest": cap_largest, "capped": {}, "largest": {}}
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    status = 0
    for what, names in (("capped", given.capped), ("largest", given.largest)):
        for name in names:
            part = given.output / f"{what}_{name}.json"
            part.unlink(missing_ok=True)
            command = [sys.executable, __file__, *(arguments or sys.argv[1:]), "--one", what, name]
            subprocess.run(command, env=environment, check=False)
            if not part.exists():
                status = 1
                continue
            document[what][name] = found = json.loads(part.read_text())
            part.unlink()
            if what == "capped":
                status |= wrong(name, found["cells"])
            elif "lms" in found:
                print(
                    f"{name}: plain {found['plain']}, LMS {found['lms']}: {found['times']:.2f} x, "
                    f"{found['of the floor']:.2f} of what the floor allows"
                )
            else:
                print(f"{name}: no size trains, or LMS knows no floor: {found['tried'][-1]}")
                status = 1
            (given.output / "gpu.json").write_text(json.dumps(document, indent=1))  # stays, whatever comes next
    return status


if __name__ == "__main__":
    sys.exit(main())
