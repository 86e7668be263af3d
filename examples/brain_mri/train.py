"""Train a 3D U-Net to segment a whole-brain MRI into background, other, grey and white matter.

The whole volume goes through the net at once, with no crops: at 2 mm and finer that takes more memory than many devices
have, which is what large model support (--lms) is for. The data is one averaged brain: that the net fits it shows that
training works, not that the model generalises to other brains.

    python examples/brain_mri/train.py --resolution 4                         # some minutes on two cores
    python examples/brain_mri/train.py --resolution 2 --lms --lms-limit 1GB    # 8 x the voxels, less memory
    lms run --limit 1GB examples/brain_mri/train.py --resolution 2             # the same again, from outside
    ddlrun -np 2 lms run --limit 1GB examples/brain_mri/train.py --resolution 2     # two ranks, 1 GB each
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it, and reads it only once

import torch
from checkpoint import CheckpointError, restore, save
from data import CLASSES, FOLDER, RESOLUTIONS, DataError, Volume, load
from loss import dice_cross_entropy, dice_scores, foreground, one_hot
from memory import Memory
from net import UNet3D
from ranks import Ranks, joined
from torch import nn
from tqdm import tqdm

if TYPE_CHECKING:
    from lms import Session

NOISE = 0.05  # standard deviation of what is added to the image, itself of standard deviation 1, anew in each step


@dataclass(frozen=True)
class Step:
    """One step of training, as it goes into the JSON file."""

    step: int  # from 1
    loss: float  # the mean over all ranks
    dice: list[float]  # of CLASSES, of the prediction that the loss is of
    seconds: float
    peak: int  # most bytes held in the step: GPU: allocated; CPU: resident set


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    args = _parse(arguments)
    try:
        train(args, arguments)
    except (CheckpointError, DataError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        status = getattr(error, "exit_status", None)  # lms.LMSError has one; a plain run has not imported lms
        if status is None:
            raise
        print(f"train.py: {error}", file=sys.stderr)
        return int(status)
    return 0


def train(args: argparse.Namespace, arguments: list[str]) -> None:
    """Train, and write whatever `args` asks for. Raises CheckpointError, DataError, and what a session raises."""
    with joined() as ranks:
        _train(args, arguments, ranks)


def _train(args: argparse.Namespace, arguments: list[str], ranks: Ranks) -> None:
    device = _device(args.device, ranks.local_rank)
    if args.memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(args.memory_fraction, device)
    _deterministic(args.seed)
    memory = Memory(device)
    model = UNet3D(len(CLASSES), args.width, args.depth)  # made on the CPU, so that every device starts from the same
    volume = load(args.resolution, model.multiple, args.data)
    model.to(device)
    image, truth = volume.image.to(device), volume.truth.to(device)
    goal = one_hot(truth, len(CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    settings = {name: getattr(args, name) for name in ("resolution", "width", "depth", "seed")}
    done = restore(args.checkpoint, model, optimizer, settings) if args.resume else 0
    trained = ranks.wrap(model)
    steps: list[Step] = []
    samples: list[tuple[float, int]] = []

    with (
        _session(args, model, optimizer) as session,
        tqdm(
            total=args.steps, initial=done, unit="step", file=sys.stderr, disable=args.quiet or not ranks.leads
        ) as bar,
    ):
        for number in range(done + 1, args.steps + 1):
            with memory.sampled(None if session is None else session.device.current) as samples:
                steps.append(_step(number, trained, optimizer, image, truth, goal, memory, samples, ranks))
            if not ranks.leads:
                continue
            bar.update()
            bar.set_postfix_str(_progress(steps[-1]))
            # Every digit of the loss: runs are compared by it.
            print(f"step {number} loss {steps[-1].loss!r} seconds {steps[-1].seconds:.2f}", flush=True)
            if args.checkpoint and (number == args.steps or number % args.checkpoint_every == 0):
                save(args.checkpoint, model, optimizer, number, settings)
        if session is not None and ranks.leads:
            print(session.describe())
            if args.trace and session.trace is not None:
                session.trace.save(args.trace)

    digests = _digests(model)
    same_bits = ranks.agree(json.dumps(digests))
    if not ranks.leads:
        return
    prediction = _predict(model, image)
    scores = dice_scores(prediction, truth, len(CLASSES))
    print(f"after {max(args.steps, done)} steps: mean foreground Dice {foreground(scores):.3f}", end="  ")
    print(*(f"{name} {score:.3f}" for name, score in zip(CLASSES, scores, strict=True)))
    if ranks.size > 1:
        print(f"{ranks.size} ranks: {'the same bits of all parameters' if same_bits else 'DIFFERENT parameters'}")
    if args.plot:
        from slices import plot

        title = f"{args.resolution} mm, {max(args.steps, done)} steps: mean foreground Dice {foreground(scores):.3f}"
        plot(args.plot, volume, prediction, title)
    if args.json:
        report = _report(args, arguments, device, volume, model, memory, steps, samples, scores, session)
        _write_json(args.json, report | {"ranks": ranks.size, "same_bits": same_bits, "sha256": digests})


def _step(
    number: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    image: torch.Tensor,
    truth: torch.Tensor,
    goal: torch.Tensor,
    memory: Memory,
    samples: list[tuple[float, int]],
    ranks: Ranks,
) -> Step:
    """One step. Its tensors die with it: none of them is there when the next forward starts."""
    memory.reset()
    began = time.perf_counter()
    optimizer.zero_grad()
    # Drawn on the CPU, so that every device sees the same; without it, the net could learn the one image by heart.
    noise = ranks.own(lambda: torch.randn(image.shape)).to(image.device)
    logits = model(image + NOISE * noise)
    loss = dice_cross_entropy(logits, goal)
    loss.backward()
    optimizer.step()
    value = ranks.mean(loss)  # on a GPU this waits for the step's end, so the time is the step's
    seconds = time.perf_counter() - began
    scores = dice_scores(logits.detach().argmax(dim=1)[0], truth, len(CLASSES))
    # A session of LMS starts the kernel's count of the peak anew all through the step, so the samples have a say too.
    peak = max([memory.peak()] + [nbytes for _, nbytes in samples])
    return Step(number, value, scores, seconds, peak)


def _predict(model: nn.Module, image: torch.Tensor) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(image).argmax(dim=1)[0]  # type: ignore[no-any-return]


def _session(
    args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer
) -> AbstractContextManager[Session | None]:
    if "lms" not in args:
        return nullcontext()
    import lms

    return lms.from_args(args, model, optimizer)


def _device(name: str, local_rank: int = 0) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, local_rank) if name == "cuda" else torch.device(name)


def _deterministic(seed: int) -> None:
    torch.manual_seed(seed)
    # One operation here has no deterministic form on a GPU, the backward of max_pool3d, and warns. As it is used it is
    # deterministic: windows that do not overlap add one gradient to a voxel at most, so no order of additions matters.
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("ignore", message=".*max_pool3d.*deterministic")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time, and nothing reads it
    # MKL's first call of a function may be less exact on one of several threads (pytorch/pytorch#188792), so one thread
    # makes it here: the loss's function, and Adam's.
    for function in (torch.exp, torch.sqrt):
        function(torch.ones(1))


def _progress(step: Step) -> str:
    return f"loss {step.loss:.4f}, Dice {foreground(step.dice):.3f}, {step.seconds:.2f} s, {step.peak / 1e6:.0f} MB"


def _report(
    args: argparse.Namespace,
    arguments: list[str],
    device: torch.device,
    volume: Volume,
    model: nn.Module,
    memory: Memory,
    steps: list[Step],
    samples: list[tuple[float, int]],
    scores: list[float],
    session: Session | None,
) -> dict[str, object]:
    began = samples[0][0] if samples else 0.0
    timeline = None if session is None else session.timeline
    return {
        "arguments": arguments,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "voxels": list(volume.truth.shape),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "classes": CLASSES,
        "peak_is_per_step": memory.resets,
        "steps": [asdict(step) for step in steps],
        "dice": scores,
        "mean_foreground_dice": foreground(scores),
        "memory": [[seconds - began, nbytes] for seconds, nbytes in samples],  # of the last step
        "mapped_peak": memory.mapped_peak,
        "lms": None if session is None else session.stats(),
        "timeline": None if timeline is None else asdict(timeline),
    }


def _digests(model: nn.Module) -> dict[str, str]:
    """SHA-256 over the bytes of all parameters, and of all gradients, in the order of their names."""
    parameters, gradients = hashlib.sha256(), hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        for digest, tensor in ((parameters, parameter), (gradients, parameter.grad)):
            digest.update(name.encode())
            if tensor is not None:
                digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return {"parameters": parameters.hexdigest(), "gradients": gradients.hexdigest()}


def _write_json(path: Path, document: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(document))
    aside.replace(path)


def _parse(arguments: list[str]) -> argparse.Namespace:
    description, _, examples = (__doc__ or "").partition("\n\n    ")
    parser = argparse.ArgumentParser(
        description=description,
        epilog="examples:\n    " + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--resolution", type=int, choices=RESOLUTIONS, default=4, help="mm a voxel (default 4)")
    parser.add_argument("--width", type=_even, default=16, metavar="N", help="channels at full resolution (default 16)")
    parser.add_argument("--depth", type=_count, default=3, metavar="N", help="number of poolings (default 3)")
    parser.add_argument("--steps", type=_count, default=120, metavar="N", help="steps in all (default 120)")
    parser.add_argument("--lr", type=float, default=0.01, metavar="RATE", help="Adam's learning rate (default 0.01)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and noise (default 0)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--data", type=Path, default=FOLDER, metavar="DIR", help="where the resampled MRI is kept")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="write the state there, and at the end")
    parser.add_argument("--checkpoint-every", type=_count, default=50, metavar="N", help="steps between (default 50)")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="three slices: image, truth, prediction")
    parser.add_argument("--json", type=Path, metavar="FILE", help="loss, Dice, time and memory of each step")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="with --lms: the recorded step, for `lms report`")
    parser.add_argument(
        "--memory-fraction",
        type=_share,
        metavar="SHARE",
        help="share of the GPU's memory that the allocator may use: a hard cap, to show what does not fit under it",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    # A plain run stays free of LMS, so that a comparison with it compares what it says.
    if any(argument.startswith(("--lms", "-h", "--help")) for argument in arguments):
        try:
            import lms
        except ModuleNotFoundError:
            if any(argument.startswith("--lms") for argument in arguments):
                parser.error(
                    "--lms needs bascule-lms, which is not installed here: `make setup`, or `pip install ./lms`"
                )
            parser.epilog = f"{parser.epilog}\n\n--lms and its options are there once bascule-lms is installed."
        else:
            lms.add_arguments(parser)
    args = parser.parse_args(arguments)
    if args.resume and not args.checkpoint:
        parser.error("--resume: give the --checkpoint to go on from")
    if args.trace and not getattr(args, "lms", False):
        parser.error("--trace: it is LMS that records the step, so give --lms too")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here; expected auto or cpu")
    if args.memory_fraction is not None and _device(args.device).type != "cuda":
        parser.error("--memory-fraction: bounds a GPU's memory, and this run is on the CPU")
    return args


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)


def _even(text: str) -> int:
    if not text.isdecimal() or int(text) < 2 or int(text) % 2:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an even number, 2 or more")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share above 0 and at most 1")
    return share


if __name__ == "__main__":
    raise SystemExit(main())
