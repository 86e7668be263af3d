"""The command `caffe`, with Caffe's commands and flags."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import bascule_caffe
from bascule_caffe.data import Feed
from bascule_caffe.errors import CaffeError
from bascule_caffe.job import Job, join, launched
from bascule_caffe.log import Log
from bascule_caffe.memory import Memory
from bascule_caffe.messages import NetParameter, SolverParameter, parse_text
from bascule_caffe.net import Net
from bascule_caffe.outputs import described, numbers_of
from bascule_caffe.signals import EFFECTS, Signals
from bascule_caffe.snapshot import load_model
from bascule_caffe.solver import Solver
from lms import LMSError

_HELP = """\
caffe train: train a net, or go on from a snapshot
caffe test: score a model
caffe time: time each layer of a net
caffe device_query: show the GPUs
caffe convert: write a model in another format (.safetensors, .pt2, .caffemodel)

`caffe COMMAND -help` lists the flags of a command. A flag is written -x v, -x=v, --x v or --x=v.

  caffe train -solver s.prototxt                            on one GPU, or on the CPU if there is none
  caffe train -solver s.prototxt -gpu all -lms 1000         on all GPUs of this host; what is over 1,000 KB is swapped
  caffe train -solver s.prototxt -snapshot x.solverstate    go on from a snapshot
  caffe train -solver s.prototxt -weights x.caffemodel      fine-tune
  ddlrun -H host1,host2 caffe train -solver s.prototxt      on several hosts
"""

_NO_EFFECT = ("-bvlc", "-threshold", "-engine")  # of Caffe-IBM and Intel's Caffe
_SWITCHES = ("-bvlc", "-help", "-h")  # flags without a value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 1 after an error that is told in a line."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    parsed = _parser().parse_args(_normal(words))
    log = Log()
    try:
        return int(parsed.run(parsed, words))
    except torch.OutOfMemoryError as error:
        said = [*str(error).splitlines()[:1], *getattr(error, "__notes__", ())]
        way = "train with -lms 1000, which swaps saved tensors of at least 1,000 KB, or take a smaller batch"
        log.error("syncedmem.cpp:71", f"{'; '.join(said)}: {way}")
        return 1
    except Exception as error:
        # DDL may not be installed, so its errors are known by their module.
        if not isinstance(error, (CaffeError, LMSError)) and not type(error).__module__.startswith("ddl."):
            raise
        log.error("caffe.cpp:1", str(error))
        return 1


def _normal(words: Sequence[str]) -> list[str]:
    """Flags as argparse wants them: `-x=v`, so that a value may begin with a dash."""
    normal: list[str] = []
    rest = iter(words)
    for word in rest:
        flag = word.replace("--", "-", 1) if word.startswith("--") else word
        name = flag.partition("=")[0]
        if name in _SWITCHES:
            normal.append(name)
        elif flag.startswith("-") and "=" not in flag and name != "-o":
            value = next(rest, None)
            normal.append(flag if value is None else f"{flag}={value}")
        else:
            normal.append(flag)
    return normal


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "caffe", usage="caffe COMMAND FLAGS", description=_HELP, formatter_class=raw, add_help=False
    )
    parser.add_argument("-help", "-h", action="help", help=argparse.SUPPRESS)
    parser.add_argument("-version", action="version", version=f"bascule-caffe {bascule_caffe.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="", help=argparse.SUPPRESS)

    def command(name: str, run: object, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, description=text, add_help=False, allow_abbrev=False, formatter_class=raw)
        made.set_defaults(run=run)
        made.add_argument("-help", "-h", action="help", help="show this")
        return made

    train = command("train", _train, "Train a net as a solver says, or go on from a snapshot.")
    train.add_argument("-solver", required=True, metavar="FILE", help="the solver (.prototxt)")
    train.add_argument("-snapshot", metavar="FILE", help="go on from this .solverstate or .solverstate.h5")
    train.add_argument(
        "-weights", metavar="FILES", help="begin with these models (.caffemodel, .h5), separated by commas"
    )
    train.add_argument(
        "-lms", type=int, metavar="KB", help="swap saved tensors of at least so many KB: see docs/caffe.md"
    )
    train.add_argument(
        "-lms_frac", type=float, metavar="F", help="with -lms: swap if more than this share of the memory is needed (0)"
    )
    train.add_argument(
        "-ddl",
        metavar="OPTIONS",
        help='options of DDL, such as "-mode b:4x8x2"; several ranks need ddlrun, not this flag',
    )
    for flag, effect in (("-sigint_effect", "stop"), ("-sighup_effect", "snapshot")):
        train.add_argument(
            flag,
            choices=sorted(EFFECTS),
            default=effect,
            help=f"what the signal does: snapshot, stop or none ({effect})",
        )
    test = command("test", _test, "Score a model on the data of a net's TEST phase.")
    timing = command("time", _time, "Time each layer of a net, forward and backward.")
    for some, required in ((test, True), (timing, False)):
        some.add_argument("-model", required=True, metavar="FILE", help="the net (.prototxt)")
        some.add_argument("-weights", required=required, metavar="FILES", help="its model (.caffemodel, .h5)")
        some.add_argument("-iterations", type=_count, default=50, metavar="N", help="how many batches (50)")
    query = command("device_query", _device_query, "Show the GPUs.")
    for some in (train, test, timing, query):
        some.add_argument(
            "-gpu", metavar="IDS", help="a GPU, several (0,1) or all; train takes several, one process each"
        )
    change = command("convert", _convert, "Write a model in another format. The ending of -o says which.")
    change.add_argument("model", metavar="net.prototxt")
    change.add_argument("weights", metavar="net.caffemodel")
    change.add_argument(
        "-o", "-output", dest="output", required=True, metavar="FILE", help=".safetensors, .pt2 or .caffemodel"
    )
    for some in (train, test, timing, change):
        some.add_argument("-level", type=int, default=0, metavar="N", help="the level of the net's state (0)")
        some.add_argument("-stage", default="", metavar="NAMES", help="stages of the net's state, separated by commas")
    for some, phase in ((timing, "TRAIN"), (change, "TEST")):
        some.add_argument("-phase", choices=("TRAIN", "TEST"), default=phase, help=f"the phase of the net ({phase})")
    for some in (train, test, timing):
        some.add_argument("-bvlc", action="store_true", help="accepted, without effect")
        for flag in ("-threshold", "-engine"):
            some.add_argument(flag, metavar="X", help="accepted, without effect")
    return parser


def _train(flags: argparse.Namespace, words: Sequence[str]) -> int:
    parameter = parse_text(flags.solver, SolverParameter)
    if flags.snapshot and flags.weights:
        raise CaffeError("-snapshot and -weights are both given: go on from a snapshot, or begin with weights")
    if flags.lms is None and flags.lms_frac is not None:
        raise CaffeError("-lms_frac needs -lms: give -lms KB, too (such as -lms 1000)")
    gpus = _gpus(flags.gpu)
    if len(gpus) > 1 and not launched():
        return _one_process_a_gpu(gpus, words)
    job = join(flags.ddl)
    log = Log(job.rank)
    _notices(flags, log)
    try:
        device = _device(
            gpus,
            job,
            log,
            wanted=flags.gpu is not None or parameter.solver_mode == parameter.GPU,
            default=parameter.device_id,
        )
        memory = Memory(flags.lms, flags.lms_frac) if flags.lms is not None and flags.lms >= 0 else None
        solver = Solver(
            parameter,
            flags.solver,
            job=job,
            device=device,
            log=log,
            memory=memory,
            level=flags.level,
            stages=_stages(flags),
        )
        try:
            if flags.snapshot:
                solver.restore(flags.snapshot)
            elif flags.weights or parameter.weights:
                solver.load_weights(flags.weights or ",".join(parameter.weights))
            log.info("caffe.cpp:251", "Starting Optimization")
            with Signals(flags.sigint_effect, flags.sighup_effect) as signals:
                solver.solve(signals)
            log.info("caffe.cpp:254", "Optimization Done.")
        finally:
            solver.close()
    finally:
        job.leave()
    return 0


def _test(flags: argparse.Namespace, words: Sequence[str]) -> int:
    log = Log()
    net = _net(flags, "TEST", log)
    log.info("caffe.cpp:281", f"Running for {flags.iterations} iterations.")
    sums: dict[int, float] = {}
    names: list[str] = []
    loss = 0.0
    for batch in range(flags.iterations):
        with torch.no_grad():
            outputs = net()
        loss += float(net.loss)
        found = list(numbers_of(net, outputs))
        names = [name for name, _ in found]
        for number, (name, value) in enumerate(found):
            sums[number] = sums.get(number, 0) + value
            log.info("caffe.cpp:304", f"Batch {batch}, {name} = {value:g}")
    net.close()
    log.info("caffe.cpp:309", f"Loss: {loss / flags.iterations:g}")
    for number, name in enumerate(names):
        log.info("caffe.cpp:321", described(net, name, sums[number] / flags.iterations))
    return 0


def _time(flags: argparse.Namespace, words: Sequence[str]) -> int:
    from bascule_caffe.timing import time_net

    log = Log()
    net = _net(flags, flags.phase, log)
    time_net(net, flags.iterations, lambda text: log.info("caffe.cpp:404", text))
    net.close()
    return 0


def _device_query(flags: argparse.Namespace, words: Sequence[str]) -> int:
    from bascule_caffe.devices import describe_devices

    log = Log()
    for line in describe_devices(_gpus(flags.gpu) if flags.gpu else None):
        log.info("common.cpp:176", line)
    return 0


def _convert(flags: argparse.Namespace, words: Sequence[str]) -> int:
    from bascule_caffe.convert import convert

    log = Log()
    try:
        lines = convert(flags.model, flags.weights, flags.output, flags.phase, flags.level, _stages(flags))
    except ValueError as error:  # another ending
        raise CaffeError(str(error)) from error
    for line in lines:
        log.info("convert", line)
    return 0


def _net(flags: argparse.Namespace, phase: str, log: Log) -> Net:
    """The net of `test` and `time`, with its weights, on its device."""
    _notices(flags, log)
    device = _device(_gpus(flags.gpu), Job(), log, wanted=flags.gpu is not None)
    net = Net(parse_text(flags.model, NetParameter), phase, flags.level, _stages(flags), data=Feed()).to(device)
    for path in flags.weights.split(",") if flags.weights else ():
        load_model(path.strip(), net)
    return net


def _count(text: str) -> int:
    """A number of iterations, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return int(text)


def _stages(flags: argparse.Namespace) -> tuple[str, ...]:
    return tuple(name for name in flags.stage.split(",") if name)


def _notices(flags: argparse.Namespace, log: Log) -> None:
    for flag in _NO_EFFECT:
        if getattr(flags, flag[1:]):
            log.warn("caffe.cpp:190", f"{flag} has no effect here")


def _gpus(text: str | None) -> list[int]:
    """The GPUs that -gpu names. Raises CaffeError if one is not there."""
    if text is None:
        return []
    there = torch.cuda.device_count()
    if text == "all":
        if not there:
            raise CaffeError("-gpu all: PyTorch finds no GPU; leave -gpu out to run on the CPU")
        return list(range(there))
    try:
        asked = [int(word) for word in text.split(",")]
    except ValueError:
        raise CaffeError(f"-gpu {text}: give the number of a GPU, several (0,1) or all") from None
    if len(set(asked)) < len(asked):
        raise CaffeError(f"-gpu {text} names a GPU twice: one process a GPU is trained on: name each once")
    missing = [str(gpu) for gpu in asked if gpu not in range(there)]
    if missing:
        has = f"there are {there}, from 0" if there else "PyTorch finds no GPU; leave -gpu out to run on the CPU"
        raise CaffeError(f"-gpu {text}: there is no GPU {', '.join(missing)}: {has}")
    return asked


def _device(gpus: Sequence[int], job: Job, log: Log, *, wanted: bool, default: int = 0) -> torch.device:
    """The device of this rank: its own of the GPUs of -gpu, or of all GPUs that it sees; or the CPU.

    One process without -gpu takes `default`. Raises CaffeError on every rank if one has no GPU of its own.
    """
    if not wanted:
        return torch.device("cpu")
    there = torch.cuda.device_count()
    own = list(gpus) or (list(range(there)) if job.size > 1 else [default])
    # A launcher such as srun --gpus-per-task=1 shows each rank its own GPU only, which is number 0 in all of them.
    by_slurm = os.environ.get("SLURM_LOCALID") == str(job.local_rank)  # and not ddlrun inside one task of Slurm's
    shown = job.size > 1 and not gpus and there == 1 and by_slurm
    index = 0 if shown else job.local_rank
    lacks = there > 0 and index >= len(own)
    if job.most(int(lacks)):
        found, way = (
            ("-gpu names", "let -gpu name more, or leave it out") if gpus else ("the host has", "start fewer ranks")
        )
        raise CaffeError(
            f"each rank needs a GPU of its own: this is rank {job.local_rank} of its host, from 0, and {found} "
            f"{len(own)}: {way}"
            if lacks
            else "another rank has no GPU of its own; its line says more"
        )
    if not there:
        log.warn("caffe.cpp:227", "PyTorch finds no GPU: using the CPU (solver_mode: CPU says so without this line)")
        return torch.device("cpu")
    number = own[index]
    if number >= there:
        raise CaffeError(f"device_id is {number}: there are {there} GPUs, from 0: give another, or -gpu")
    log.info("caffe.cpp:218", f"Using GPU {number}")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _one_process_a_gpu(gpus: Sequence[int], words: Sequence[str]) -> int:
    """Replace this process by ddlrun, which starts this command once for each GPU."""
    ddlrun = Path(sys.executable).with_name("ddlrun")
    if not ddlrun.exists():
        raise CaffeError(
            f"several GPUs need ddlrun of the package bascule-ddl, which is not beside {sys.executable}: install it"
        )
    line = [str(ddlrun), "-np", str(len(gpus)), sys.executable, "-m", "bascule_caffe", *words]
    Log().info("caffe.cpp:218", f"Using GPUs {', '.join(map(str, gpus))}: {' '.join(line)}")
    os.execv(line[0], line)


if __name__ == "__main__":
    sys.exit(main())
