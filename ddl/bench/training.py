"""Measure a training step over ddl and gloo: `make bench-training`, or `python ddl/bench/training.py --quick`."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import machine
import step_chart
from harness import Benchmark
from runs import Goodput, describe
from shaped import ROOT, BenchError, ddlrun, run, steady
from steps import DDL, GLOO, Steps, faults, steps_of, table
from verdicts import Verdict, judge_steps, lines

from ddl.launch.arguments import read
from ddl.planning import interface, network, picture
from ddl.planning.units import format_size, format_time
from testbed import Testbed

TRAINEE = Path(__file__).with_name("trainee.py")


@dataclass(frozen=True)
class Training:
    """Training steps on one cluster. Without racks: on this host alone, over shared memory."""

    name: str
    title: str
    racks: tuple[int, ...]  # hosts in each
    ranks: int  # on each host
    link: str = "200mbit"
    uplink: str = "100mbit"
    contestants: tuple[str, ...] = (DDL, GLOO)
    batch: int = 2  # images a rank and step
    width: int = 64  # channels of the first stage
    rounds: int = 12  # a multiple of twice the contestants (with ALONE): each follows each other equally often
    judged: bool = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.ranks * (sum(self.racks) or 1)


ALL = (
    Training("host", "one host, a rank on each of its 2 cores: shared memory", racks=(), ranks=2, batch=8),
    Training("racks", "2 racks x 2 hosts x 1 rank", racks=(2, 2), ranks=1, judged=True),
)


@dataclass(frozen=True)
class Trained:
    """A training's record, and the goodput of its links if they are shaped."""

    training: Training
    record: Mapping[str, object]
    before: Goodput | None = None
    after: Goodput | None = None
    tries: int = 1

    @property
    def steps(self) -> dict[str, Steps]:
        """The results of each contestant, by name."""
        return steps_of(self.record)

    @property
    def bound(self) -> float:
        """The least seconds of an allreduce of all gradients; 0 if links are not shaped."""
        if self.before is None or self.after is None:
            return 0.0
        it = self.training
        described = describe(it.title, it.racks, it.ranks, self.before.mid(self.after))
        return interface.bounds(network.from_dict(described).tree, self.nbytes).cut

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        nbytes = self.record["bytes"]
        assert isinstance(nbytes, int)
        return nbytes

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts on its targets."""
        return judge_steps(self.steps, self.bound) if self.training.judged else []


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 if a training could not be run, or computed something wrong."""
    bench: Benchmark[Training, Trained] = Benchmark(
        "ddl/bench/training.py", "Time a training step over ddl and gloo", ALL
    )
    bench.parser.add_argument(
        "--contestants", type=read(_contestants), metavar="NAME[:MB],...",
        help="these; MB: of a bucket (default: ddl,gloo)",
    )  # fmt: skip
    asked = bench.parser.parse_args(argv)

    def measure(training: Training, tell: Callable[[str], None]) -> Trained:
        if asked.contestants:
            training = replace(training, contestants=asked.contestants, rounds=2 * (len(asked.contestants) + 1))
        if asked.quick:
            training = replace(training, width=8, rounds=2, link="1gbit", uplink="500mbit", judged=False)
        return trained(training, tell)

    done, whole = bench.run(asked, measure, report, _keep)
    return 0 if whole and not any(faults(one.steps) for one in done) else 1


def _contestants(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if DDL not in names or not all(re.fullmatch(r"(ddl|gloo)(:[\d.]+)?", name) for name in names):
        raise ValueError(f"{text!r}: expected ddl and others, such as ddl,gloo,ddl:5,gloo:100")
    return names


def trained(training: Training, tell: Callable[[str], None]) -> Trained:
    """Train; on a virtual cluster until its calibrations agree. Raises BenchError."""

    def work(bed: Testbed | None) -> Mapping[str, object]:
        tell(f"{training.rounds} rounds of {', '.join(training.contestants)}")
        return _train(training, bed)

    if not training.racks:
        return Trained(training, work(None))
    held = steady(training.name, training.racks, training.link, training.uplink, work, tell)
    return Trained(training, held.result, held.before, held.after, held.tries)


def _train(training: Training, bed: Testbed | None) -> Mapping[str, object]:
    with tempfile.TemporaryDirectory(prefix="ddl-bench-", dir=ROOT / "out") as folder:  # the hosts see this one
        file = Path(folder, "record.json")
        words = [sys.executable, str(TRAINEE), "--json", str(file), "--contestants", ",".join(training.contestants)]
        for option in ("batch", "width", "rounds"):
            words += [f"--{option}", str(getattr(training, option))]
        status, errors = run(ddlrun([], training.size, words, bed))
        if status or not file.is_file():
            raise BenchError(f"{training.name}: ddlrun ended with {status}: {errors.strip()[-2000:]}")
        record: dict[str, object] = json.loads(file.read_text())
        return record


def report(made: Trained) -> list[str]:
    """A training's table and verdicts, as text."""
    it = made.training
    images = f"{it.batch} image{'' if it.batch == 1 else 's'}"
    said = [f"{it.title}: {images} a rank, {format_size(made.nbytes)} of gradients"]
    if made.before is not None and made.after is not None:
        said += [f"calibrated before: {made.before}", f"calibrated after: {made.after}"]
        said.append(f"bound of one allreduce of all gradients: {format_time(made.bound)}")
    said.append(table(made.steps, made.bound))
    wrong = [f"WRONG      {one}" for one in faults(made.steps)]
    return [*said, *(wrong or ["right      the losses of all contestants, and the parameters on all ranks"]),
            *lines(made.verdicts)]  # fmt: skip


def _keep(folder: Path, done: Sequence[Trained]) -> None:
    runs = [
        {
            "training": asdict(one.training),
            "before": one.before and asdict(one.before),
            "after": one.after and asdict(one.after),
            "tries": one.tries,
            "bound": one.bound,
            "record": one.record,
            "faults": faults(one.steps),
            "verdicts": [asdict(verdict) for verdict in one.verdicts],
        }
        for one in done
    ]
    machine.write(folder / "training.json", {"format": "ddl-training-1", "runs": runs})
    last = done[-1]
    title = f"a training step, {format_size(last.nbytes)} of gradients: {last.training.title}"
    picture.write(step_chart.draw(last.steps, last.bound, title), folder / f"training_{last.training.name}.svg")


if __name__ == "__main__":
    sys.exit(main())
