"""The command `caffe`, with Caffe's commands and flags."""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from bascule_caffe import devices
from bascule_caffe.data import Feed
from bascule_caffe.errors import CaffeError
from bascule_caffe.job import Job, join, launched
from bascule_caffe.log import Log, described, numbers_of
from bascule_caffe.memory import Memory
from bascule_caffe.messages import NetParameter, SolverParameter, parse_text
from bascule_caffe.net import Net
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

_DDL_SWITCHES = ("-ddl_update", "-ddl_align", "-ddl_database_restart")
_NO_EFFECT = ("-bvlc", "-threshold", "-engine", *_DDL_SWITCHES)  # of Caffe-IBM and Intel's Caffe
_SWITCHES = ("-bvlc", *_DDL_SWITCHES, "-help", "-h")  # flags without a value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, 1 after an error that is told in a line, or 130 after Ctrl-C."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    parsed = _parser().parse_args(["-help"] if words in ([], ["help"]) else _normal(words))
    parsed.words = words
    log = Log()
    try:
        return int(parsed.run(parsed))
    except torch.OutOfMemoryError as error:
        said = [*str(error).splitlines()[:1], *getattr(error, "__notes__", ())]
        way = "train with -lms 1000, which swaps saved tensors of at least 1,000 KB, or take a smaller batch"
        log.error("syncedmem.cpp:71", f"{'; '.join(said)}: {way}")
        return 1
    except KeyboardInterrupt:
        return 130
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


def _train(flags: argparse.Namespace) -> int:
    parameter = parse_text(flags.solver, SolverParameter)
    if flags.snapshot and flags.weights:
        raise CaffeError("-snapshot and -weights are both given: go on from a snapshot, or begin with weights")
    if flags.lms is None and flags.lms_frac is not None:
        raise CaffeError("-lms_frac needs -lms: give -lms KB, too (such as -lms 1000)")
    gpus = devices.named(flags.gpu)
    if len(gpus) > 1 and not launched():
        return _one_process_a_gpu(gpus, flags.words)
    job = join(flags.ddl)
    log = Log(job.rank)
    _notices(flags, log)
    with ExitStack() as at_end:
        at_end.callback(job.leave)
        wanted = flags.gpu is not None or parameter.solver_mode == parameter.GPU
        device = devices.own(gpus, job, log, wanted=wanted, default=parameter.device_id)
        memory = Memory(flags.lms, flags.lms_frac) if flags.lms is not None and flags.lms >= 0 else None
        state = {"level": flags.level, "stages": _stages(flags)}
        solver = Solver(parameter, flags.solver, job=job, device=device, log=log, memory=memory, **state)
        at_end.callback(solver.close)
        if flags.snapshot:
            solver.restore(flags.snapshot)
        elif flags.weights or parameter.weights:
            solver.load_weights(flags.weights or ",".join(parameter.weights))
        log.info("caffe.cpp:251", "Starting Optimization")
        with Signals(flags.sigint_effect, flags.sighup_effect, launched=launched()) as signals:
            job.take_signals()
            solver.solve(signals)
        log.info("caffe.cpp:254", "Optimization Done.")
    return 0


def _test(flags: argparse.Namespace) -> int:
    log = Log()
    net = _net(flags, "TEST", log)
    log.info("caffe.cpp:281", f"Running for {flags.iterations} iterations.")
    loss, names = 0.0, list[str]()
    sums: dict[int, float] = defaultdict(float)  # of each number of the outputs
    for batch in range(flags.iterations):
        with torch.no_grad():
            outputs = net()
        loss += float(net.loss)
        names.clear()
        for number, (name, value) in enumerate(numbers_of(net, outputs)):
            names.append(name)
            sums[number] += value
            log.info("caffe.cpp:304", f"Batch {batch}, {name} = {value:g}")
    net.close()
    log.info("caffe.cpp:309", f"Loss: {loss / flags.iterations:g}")
    for number, name in enumerate(names):
        log.info("caffe.cpp:321", described(net, name, sums[number] / flags.iterations))
    return 0


def _time(flags: argparse.Namespace) -> int:
    from bascule_caffe.timing import time_net

    log = Log()
    net = _net(flags, flags.phase, log)
    time_net(net, flags.iterations, lambda text: log.info("caffe.cpp:404", text))
    net.close()
    return 0


def _device_query(flags: argparse.Namespace) -> int:
    there = list(range(torch.cuda.device_count()))
    for line in devices.described(devices.named(flags.gpu) if flags.gpu else there):
        Log().info("common.cpp:176", line)
    return 0


def _convert(flags: argparse.Namespace) -> int:
    from bascule_caffe.convert import convert

    for line in convert(flags.model, flags.weights, flags.output, flags.phase, flags.level, _stages(flags)):
        Log().info("convert", line)
    return 0


def _net(flags: argparse.Namespace, phase: str, log: Log) -> Net:
    """The net of `test` and `time`, with its weights, on its device."""
    _notices(flags, log)
    device = devices.own(devices.named(flags.gpu), Job(), log, wanted=flags.gpu is not None)
    net = Net(parse_text(flags.model, NetParameter), phase, flags.level, _stages(flags), data=Feed()).to(device)
    paths = flags.weights.split(",") if flags.weights else []
    taken = [name for path in paths for name in load_model(path.strip(), net)]
    if paths and (left := net.left_out(taken)):
        log.warn("caffe.cpp:155", f"Not in the model, and as their fillers made them: {left}")
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
        if getattr(flags, flag[1:], None):
            log.warn("caffe.cpp:190", f"{flag} has no effect here")


def _one_process_a_gpu(gpus: Sequence[int], words: Sequence[str]) -> int:
    """Replace this process by ddlrun, which starts this command, or the user's program, once for each GPU."""
    if sys.orig_argv[-len(words) :] != [*words]:  # called with other words, or from a notebook
        raise CaffeError(f"several GPUs need one process each: start this program by ddlrun -np {len(gpus)}")
    ddlrun = Path(sys.executable).with_name("ddlrun")
    if not ddlrun.exists():
        where = f"which is not beside {sys.executable}: install it"
        raise CaffeError(f"several GPUs need ddlrun of the package bascule-ddl, {where}")
    line = [str(ddlrun), "-np", str(len(gpus)), sys.executable, *sys.orig_argv[1:]]
    Log().info("caffe.cpp:218", f"Using GPUs {', '.join(map(str, gpus))}: {' '.join(line)}")
    os.execv(line[0], line)


_FILE, _FILES, _IDS = {"metavar": "FILE"}, {"metavar": "FILES"}, {"metavar": "IDS"}
_PHASES, _EFFECTS = ("TRAIN", "TEST"), tuple(sorted(EFFECTS))
_SWITCH: dict[str, Any] = {"action": "store_true"}
_COMMANDS = {
    "train": (_train, "Train a net as a solver says, or go on from a snapshot."),
    "test": (_test, "Score a model on the data of a net's TEST phase."),
    "time": (_time, "Time each layer of a net, forward and backward."),
    "device_query": (_device_query, "Show the GPUs."),
    "convert": (_convert, "Write a model in another format. The ending of -o says which."),
}
# Commands, flag, help, and what argparse should know.
_FLAGS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("train", "-solver", "the solver (.prototxt)", {"required": True, **_FILE}),
    ("train", "-snapshot", "go on from this .solverstate or .solverstate.h5", _FILE),
    ("test time", "-model", "the net (.prototxt)", {"required": True, **_FILE}),
    ("train", "-weights", "begin with these models (.caffemodel, .h5), separated by commas", _FILES),
    ("test", "-weights", "its model (.caffemodel, .h5)", {"required": True, **_FILES}),
    ("time", "-weights", "its model (.caffemodel, .h5)", _FILES),
    ("test time", "-iterations", "how many batches (50)", {"type": _count, "default": 50, "metavar": "N"}),
    ("train test time device_query", "-gpu", "a GPU; several (0,1) or all if you train: one process each", _IDS),
    ("train", "-lms", "swap saved tensors of at least so many KB: see docs/caffe.md", {"type": int, "metavar": "KB"}),
    (
        "train",
        "-lms_frac",
        "with -lms: how much of the GPU's memory may be used, 0 to 1; 0 swaps all",
        {"type": float, "metavar": "F"},
    ),
    ("train", "-ddl", 'options of DDL, such as "-mode b:4x8x2"; several ranks need ddlrun', {"metavar": "OPTIONS"}),
    ("train", "-sigint_effect", "what Ctrl-C does (stop)", {"choices": _EFFECTS, "default": "stop"}),
    ("train", "-sighup_effect", "what SIGHUP does (snapshot)", {"choices": _EFFECTS, "default": "snapshot"}),
    ("convert", "model", "the net", {"metavar": "net.prototxt"}),
    ("convert", "weights", "its model", {"metavar": "net.caffemodel"}),
    ("convert", "-o -output", ".safetensors, .pt2 or .caffemodel", {"dest": "output", "required": True, **_FILE}),
    ("train", "-level", "the level of the training net's state (0)", {"type": int, "default": 0}),
    ("train", "-stage", "stages of the training net's state, separated by commas", {"default": ""}),
    ("test time convert", "-level", "the level of the net's state (0)", {"type": int, "default": 0}),
    ("test time convert", "-stage", "stages of the net's state, separated by commas", {"default": ""}),
    ("time", "-phase", "the phase of the net (TRAIN)", {"choices": _PHASES, "default": "TRAIN"}),
    ("convert", "-phase", "the phase of the net (TEST)", {"choices": _PHASES, "default": "TEST"}),
    ("train test time", "-bvlc", "accepted, without effect", _SWITCH),
    *(("train", flag, "accepted, without effect", _SWITCH) for flag in _DDL_SWITCHES),
    ("train test time", "-threshold", "accepted, without effect", {"metavar": "X"}),
    ("train test time", "-engine", "accepted, without effect", {"metavar": "X"}),
)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "caffe", usage="caffe COMMAND FLAGS", description=_HELP, formatter_class=raw, add_help=False
    )
    parser.add_argument("-help", "-h", action="help", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS)
    for name, (run, text) in _COMMANDS.items():
        made: dict[str, Any] = {"add_help": False, "allow_abbrev": False, "formatter_class": raw}
        command = commands.add_parser(name, prog=f"caffe {name}", description=text, **made)
        command.set_defaults(run=run)
        command.add_argument("-help", "-h", action="help", help="show this")
        for users, flag, help_text, options in _FLAGS:
            if name in users.split():
                command.add_argument(*flag.split(), help=help_text, **options)
    return parser
