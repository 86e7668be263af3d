"""What the figures of this benchmark mean, and whether they are what they must be. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

NEAR = 0.05  # that reads and memory may be away from fio and from C
FORESEEN = 0.15  # that a predicted step may be away from the measured one
ALIKE = 0.02  # of each other: steps that no measurement here tells apart
HUNDREDTH = 0.01  # of a core, for the thread that reads counters

DEFINITIONS: Mapping[str, str] = {
    "turns": "contestants alternate; what is compared are the turns of one round, and the median over rounds counts",
    "file": (
        "bytes of the whole file over the sum of its copies' times, at one block size, O_DIRECT, one copy at a time; "
        "fio with ioengine=psync, direct=1 on the same file, by the time that fio states"
    ),
    "same": (
        "fio copies to and from the memory that ours does (iomem=mmapshared, in huge pages if the kernel reserves "
        "them), and does not change it between writes (scramble_buffers=0): a copy's speed depends on where its pages "
        "lie. fio as it comes stands beside it"
    ),
    "read": "median over rounds of our rate over fio's; must be within 5% of 1",
    "write": "our median rate; must lie between fio's slowest and fastest round",
    "memory": (
        "median over rounds of our rate over that of a loop of memcpy in C++ (g++ -O2) in the same memory and on the "
        "same processor; must be within 5% of 1"
    ),
    "step": (
        "seconds of a pass (forward and backward) with a quarter of its saved bytes on the device and the rest in a "
        "file on a disk that the kernel throttles (blkio, of a loop device over memory): predicted by `lms link "
        "compare --trace` from `lms link measure` on the throttled disk and a trace of the same round without "
        "throttle, over the median of the measured passes; the median over rounds must be within 15% of 1"
    ),
    "order": (
        "the throttled disks in the order of their predicted steps, and of their measured ones; must be the same, "
        "but for disks whose predicted steps are within 2% of each other"
    ),
    "overhead": "processor time of the whole process that does nothing but sample counters, over the time; at most 1%",
}


@dataclass(frozen=True)
class Verdict:
    """One figure beside what it must be."""

    what: str
    value: float
    target: str
    reached: bool
    note: str = ""


def rates_of(turns: Sequence[float]) -> str:
    """Rates (bytes a second) of all turns, for people: the median with the quartiles' distance."""
    low, _, high = quantiles(turns, n=4, method="inclusive") if len(turns) > 1 else (turns[0],) * 3
    middle = median(turns)
    return f"{middle / 1e9:.3g} GB/s ± {(high - low) / 2 / middle:.0%}"


def near(what: str, ours: Sequence[float], theirs: Sequence[float]) -> Verdict:
    """Rates of the same rounds: the median ratio, which must be within NEAR of 1."""
    ratio = median(one / other for one, other in zip(ours, theirs, strict=True))
    note = f"{rates_of(ours)}; the other {rates_of(theirs)}"
    return Verdict(what, ratio, f"{1 - NEAR:.2f} to {1 + NEAR:.2f}", abs(ratio - 1) <= NEAR, note)


def inside(what: str, ours: Sequence[float], theirs: Sequence[float]) -> Verdict:
    """Our median rate, which must lie between the other's slowest and fastest round."""
    value, low, high = median(ours), min(theirs), max(theirs)
    return Verdict(what, value / 1e9, f"{low / 1e9:.3g} to {high / 1e9:.3g} GB/s", low <= value <= high)


def foreseen(what: str, predicted: Sequence[float], measured: Sequence[float]) -> Verdict:
    """Predicted steps over the measured ones of the same rounds: the median."""
    ratio = median(one / other for one, other in zip(predicted, measured, strict=True))
    note = f"predicted {median(predicted):.3g} s, measured {median(measured):.3g} s"
    return Verdict(what, ratio, f"{1 - FORESEEN:.2f} to {1 + FORESEEN:.2f}", abs(ratio - 1) <= FORESEEN, note)


def ordered(predicted: Mapping[str, Sequence[float]], measured: Mapping[str, Sequence[float]]) -> Verdict:
    """Whether both have the machines in the same order: the share of pairs that they agree on.

    Machines whose predicted steps are equal to ALIKE are not to be told apart, and no order of theirs is wrong.
    """
    names = list(predicted)
    first, second = ({name: median(side[name]) for name in names} for side in (predicted, measured))
    pairs = [
        (one, other)
        for at, one in enumerate(names)
        for other in names[at + 1 :]
        if abs(first[one] / first[other] - 1) > ALIKE
    ]
    agreed = sum((first[one] < first[other]) == (second[one] < second[other]) for one, other in pairs)
    share = agreed / len(pairs) if pairs else 1.0
    note = " < ".join(sorted(names, key=lambda name: first[name]))
    return Verdict("order of the disks, by predicted and by measured steps", share, "1", share == 1.0, note)


def overhead(share: float) -> Verdict:
    """What sampling counters takes of a core."""
    return Verdict("sampling counters, share of a core", share, f"at most {HUNDREDTH}", share <= HUNDREDTH)


def lines(verdicts: Sequence[Verdict]) -> list[str]:
    """The verdicts as text."""
    width = max((len(one.what) for one in verdicts), default=0)
    return [
        f"{'ok' if one.reached else 'MISSED':<8}{one.what:<{width}}  {one.value:.3g}, must be {one.target}"
        + (f" ({one.note})" if one.note else "")
        for one in verdicts
    ]
