"""The benchmark's figures: their meaning, and whether they reach their targets. Pure: no clock, process or framework.

docs/benchmarks.md explains each figure of DEFINITIONS in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, quantiles

DEFINITIONS: Mapping[str, str] = {
    "saved": "bytes of all records of one pass: what autograd saved, each storage counted once for each version",
    "share": "the part of `saved` that may stay on the device; the cell's budget is share x saved",
    "largest": "bytes of the largest record: the tolerance of every target about memory",
    "ratio": "a cell's step time over plain's step time in the same round; its figure is the median over the rounds",
    "over the pool": "a cell's step time divided by the time of the cell *pool* in the same round; the median over the "
    "rounds. It says what swapping costs, without the allocator's gain",
    "over the other": "a cell's step time over that of the other checkout's LMS with the same budget in the same "
    "round; the median over the rounds",
    "noise floor": "distance from 1 of the farther quartile of the ratios of plain's second process to its first",
    "identical": "loss and every gradient of every step, warm-up included, have the same bits as plain's",
    "managed peak": "most bytes of records that LMS held at once in any pass, copies in flight included",
    "resident peak": "most bytes on the device in any timed step: VmHWM on a CPU, allocated bytes on a GPU",
    "floor": "the resident peak at share 0 in the timed steps, less what LMS held at that moment. Swapping cannot "
    "lower it",
    "bytes out": "bytes that a timed pass copied to the tier below; the most of any timed pass",
    "bytes back": "bytes that a timed pass copied from the tier below; the most of any timed pass",
    "step time": "the ratio at the share that is judged, 35%",
    "disk bound": "max(plain's step time, minimum bytes / bandwidth out + minimum bytes / bandwidth back); minimum "
    "bytes are saved less budget, the bandwidths those that the session measured",
    "against swap": "step time of plain on the system's swap over that of LMS, in the same round, both under one cap",
    "hook time": "seconds that LMS's own code ran, over the step's CPU time, with everything fitting",
    "predicted peak": "managed peak that the simulator predicted for a pass, less the one measured in that pass",
    "predicted transfers": "the link's busy time predicted for a pass, out and back, relative to the one measured",
    "predicted stalls": "the time waited for copies predicted for a pass, out and back, relative to the one measured",
}

STEP_TARGET = 1.10  # times plain, beyond the noise floor
DISK_TARGET = 1.15  # times the disk bound, if the disk cannot hide the minimum bytes
SWAP_TARGET = 1.5
HOOK_TARGET = 0.02
FORECAST_TARGET = 0.15
STALL_MATTERS = 0.01  # of the step time: shorter stalls, foretold and measured, are not compared
JUDGED_SHARE = 0.35


@dataclass(frozen=True)
class Step:
    """One step of one cell. Seconds and bytes; `session` and `forecast` are those of an LMS cell, else empty."""

    seconds: float
    cpu: float
    loss: str  # hexadecimal: all its bits
    digest: str  # of all gradients
    peak: int
    minor_faults: int = 0
    major_faults: int = 0
    session: Mapping[str, float] = field(default_factory=dict)  # stats after the step, and what the pass measured
    forecast: Mapping[str, float] = field(default_factory=dict)  # of the plan that the pass executed


@dataclass
class Cell:
    """One way to train one model. `warm` steps come before the timed ones."""

    name: str
    kind: str  # plain | pool | jemalloc | checkpoint | lms
    share: float | None = None  # None: everything fits, or not LMS
    budget: int | None = None
    cap: int | None = None  # bytes, if the cell ran under one
    other: bool = False  # it is the other checkout's LMS
    warm: int = 0
    steps: list[Step] = field(default_factory=list)
    note: str = ""  # why it did not run, or ended early

    @property
    def timed(self) -> list[Step]:
        """The steps that count."""
        return self.steps[self.warm :]

    @property
    def seconds(self) -> float:
        """Median step time."""
        return median(step.seconds for step in self.timed)

    @property
    def peak(self) -> int:
        """Resident peak: the most of any timed step."""
        return max(step.peak for step in self.timed)

    @property
    def managed_peak(self) -> int:
        """Most bytes that LMS held in any step."""
        return int(max(step.session["held_peak"] for step in self.steps))

    def last(self, key: str) -> float:
        """A counter after the last step."""
        return self.steps[-1].session[key]


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and range of some values."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    least: float
    most: float
    count: int


@dataclass(frozen=True)
class Verdict:
    """One figure of one cell beside its target. `reached` is None if it could not be judged; `note` says why."""

    cell: str
    figure: str  # a key of DEFINITIONS
    value: float | None
    target: float | None
    reached: bool | None
    unit: str  # "bytes" | "ratio" | ""
    note: str = ""


def spread(values: Sequence[float]) -> Spread:
    """Raises ValueError when there are no values."""
    if not values:
        raise ValueError("no values to take the spread of")
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return Spread(middle, low, high, min(values), max(values), len(values))


def paired(cell: Cell, reference: Cell) -> list[float]:
    """The cell's step times over the reference's, round by round, for the rounds that both ran."""
    return [a.seconds / b.seconds for a, b in zip(cell.timed, reference.timed, strict=False)]


def noise_floor(ratios: Sequence[float]) -> float:
    """How far from 1 plain is from plain: the farther quartile."""
    found = spread(ratios)
    return max(abs(found.low - 1), abs(found.high - 1))


def differing_steps(cell: Cell, plain: Cell) -> list[int]:
    """Numbers of the steps with a loss or gradients that differ from plain's in any bit."""
    return [
        number
        for number, (a, b) in enumerate(zip(cell.steps, plain.steps, strict=False))
        if (a.loss, a.digest) != (b.loss, b.digest)
    ]


def identical(cell: Cell, plain: Cell) -> Verdict:
    """Whether every step gave plain's bits."""
    differ = differing_steps(cell, plain)
    note = f"differs from plain in step {', '.join(map(str, differ))}" if differ else ""
    return Verdict(cell.name, "identical", float(len(differ)), 0.0, not differ, "", note)


def memory(cell: Cell, floor: int | None) -> list[Verdict]:
    """The targets about memory and bytes moved, of an LMS cell with a budget."""
    assert cell.budget is not None
    saved, largest = cell.last("saved"), cell.last("largest")
    room = max(0.0, saved - cell.budget) + largest
    out = max(step.session["last_out"] for step in cell.timed)
    back = max(step.session["last_in"] for step in cell.timed)
    resident = None if floor is None else floor + cell.budget + largest
    return [
        _at_most(cell, "managed peak", cell.managed_peak, cell.budget + largest, "bytes"),
        Verdict(cell.name, "resident peak", cell.peak, None, None, "bytes", "the floor needs the cell with share 0")
        if resident is None
        else _at_most(cell, "resident peak", cell.peak, resident, "bytes"),
        _at_most(cell, "bytes out", out, room, "bytes"),
        replace(_at_most(cell, "bytes back", back, room, "bytes"), note=_why_again(cell)),
    ]


def _why_again(cell: Cell) -> str:
    again = cell.last("again")
    return f"the bound on held bytes makes {again / 1e6:.0f} MB come back twice" if again else ""


def disk_bound(plain_seconds: float, minimum: float, out: float, back: float) -> float:
    """See DEFINITIONS. `out` and `back` are bytes a second."""
    return max(plain_seconds, minimum / out + minimum / back)


def step_time(cell: Cell, plain: Cell, noise: float) -> Verdict:
    """The target about time of an LMS cell with a budget."""
    assert cell.budget is not None
    ratio = median(paired(cell, plain))
    if ratio <= STEP_TARGET + noise:
        return Verdict(cell.name, "step time", ratio, STEP_TARGET + noise, True, "ratio")
    out, back = cell.last("link_out"), cell.last("link_back")
    if out and back:
        minimum = max(0.0, cell.last("saved") - cell.budget)
        bound = disk_bound(plain.seconds, minimum, out, back)
        if bound > plain.seconds:
            target = DISK_TARGET * bound / plain.seconds
            note = f"the disk cannot hide the plan's bytes: {out / 1e9:.2f} GB/s out, {back / 1e9:.2f} GB/s back"
            return Verdict(cell.name, "step time", ratio, target, ratio <= target, "ratio", note)
    return Verdict(cell.name, "step time", ratio, STEP_TARGET + noise, False, "ratio", "the disk could hide the bytes")


def against_swap(swap: Cell, managed: Cell) -> Verdict:
    """The target about speed beside the system's swap."""
    if not swap.timed or not managed.timed:
        return Verdict(managed.name, "against swap", None, SWAP_TARGET, None, "ratio", swap.note or managed.note)
    ratio = median(paired(swap, managed))
    faults = median(step.major_faults for step in swap.timed)
    note = f"plain took {faults:.0f} major faults a step"
    return Verdict(managed.name, "against swap", ratio, SWAP_TARGET, ratio >= SWAP_TARGET, "ratio", note)


def over_the_other(cell: Cell, other: Cell, noise: float) -> Verdict:
    """The target beside the LMS of another checkout: not slower, beyond the noise floor."""
    ratio = median(paired(cell, other))
    return Verdict(cell.name, "over the other", ratio, 1 + noise, ratio <= 1 + noise, "ratio")


def fitting(cell: Cell) -> list[Verdict]:
    """The targets with everything fitting: nothing moved, and little time in the hooks."""
    moved = cell.last("swapped_out") + cell.last("swapped_in")
    hooks = [
        (after.session["hook_time"] - before.session["hook_time"]) / after.cpu
        for before, after in zip(cell.steps, cell.steps[1:], strict=False)
    ]
    return [
        Verdict(cell.name, "bytes out", moved, 0.0, moved == 0, "bytes", "out and back, over the whole session"),
        _at_most(cell, "hook time", median(hooks[max(0, cell.warm - 1) :]), HOOK_TARGET, "ratio"),
    ]


def forecasts(cells: Mapping[str, Cell]) -> list[Verdict]:
    """The simulator's targets over all LMS cells with a budget, of all models, by the names to call them by."""
    peaks: list[Verdict] = []
    transfers: list[float] = []
    stalls: list[float] = []
    silent = 0
    for name, cell in cells.items():
        steps = [step for step in cell.timed if step.forecast]
        if not steps:
            peaks.append(Verdict(name, "predicted peak", None, None, None, "bytes", "no plan was executed"))
            continue
        off = max((step.forecast["held_peak"] - step.session["pass_held_peak"] for step in steps), key=abs)
        largest = cell.last("largest")
        peaks.append(Verdict(name, "predicted peak", off, largest, abs(off) <= largest, "bytes"))
        if errors := [error(*_transfers(step)) for step in steps if _transfers(step)[1]]:
            transfers.append(median(errors))
        loud = [_stalls(step) for step in steps if max(_stalls(step)) > STALL_MATTERS * step.seconds]
        if loud:
            stalls.append(median(error(*pair) for pair in loud))
        else:
            silent += 1
    note = f"median over {len(stalls)} cells; in {silent} more, stalls foretold and measured are below 1% of the step"
    return [
        *peaks,
        _forecast("predicted transfers", transfers, f"median over {len(transfers)} cells"),
        _forecast("predicted stalls", stalls, note),
    ]


def floor_of(cells: Sequence[Cell]) -> int | None:
    """The floor, from the cell with share 0; None without one."""
    for cell in cells:
        if cell.share == 0 and cell.timed:
            return cell.peak - int(cell.last("held_at_floor"))
    return None


def judge(cells: Mapping[str, Cell]) -> list[Verdict]:
    """Every target of one model but the simulator's. `cells` has plain and plain-again at least."""
    plain = cells["plain"]
    ran = [cell for cell in cells.values() if cell.timed]
    verdicts = [identical(cell, plain) for cell in ran if cell is not plain]
    budgeted = [cell for cell in ran if cell.kind == "lms" and cell.share is not None and not cell.other]
    floor = floor_of(budgeted)
    noise = noise_floor(paired(cells["plain-again"], plain))
    for cell in budgeted:
        if cell.cap is None:
            verdicts += memory(cell, floor)
            if cell.share == JUDGED_SHARE:
                verdicts.append(step_time(cell, plain, noise))
    for cell in ran:
        if cell.other:
            ours = cells[cell.name.partition(" ")[0]]
            verdicts += [over_the_other(ours, cell, noise)] if ours.timed else []
    if "swap" in cells and "lms-capped" in cells:
        verdicts.append(against_swap(cells["swap"], cells["lms-capped"]))
    if "lms-fits" in cells and cells["lms-fits"].timed:
        verdicts += fitting(cells["lms-fits"])
    return verdicts


def _at_most(cell: Cell, figure: str, value: float, target: float, unit: str) -> Verdict:
    return Verdict(cell.name, figure, value, target, value <= target, unit)


def error(foretold: float, measured: float) -> float:
    """How far a forecast is from what was measured, as a part of the latter; infinite if nothing was measured."""
    return abs(foretold - measured) / measured if measured else float("inf")


def _transfers(step: Step) -> tuple[float, float]:
    """Seconds that the link was busy, both ways: foretold, measured."""
    return (
        step.forecast["busy_out"] + step.forecast["busy_in"],
        step.session["busy_out"] + step.session["busy_in"],
    )


def _stalls(step: Step) -> tuple[float, float]:
    """Seconds that the computation waited for copies: foretold, measured."""
    return (
        step.forecast["stall_out"] + step.forecast["stall_in"],
        step.session["last_stall_out"] + step.session["last_stall_in"],
    )


def _forecast(figure: str, errors: Sequence[float], note: str) -> Verdict:
    if not errors:
        return Verdict("all", figure, None, FORECAST_TARGET, None, "ratio", f"nothing to compare: {note}")
    error = median(errors)
    return Verdict("all", figure, error, FORECAST_TARGET, error <= FORECAST_TARGET, "ratio", note)
