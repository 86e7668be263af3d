"""Every metric once: its name, kind, unit and meaning. The names follow OpenMetrics: base units, at the name's end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# A figure of a source: one number, or one for each set of values of the family's labels. None: not known (yet).
Figure = float | int | None | Mapping[tuple[str, ...], float]
# A sample: for each family by name the values of its own labels, and the number.
Sample = dict[str, list[tuple[list[str], float]]]

COMMON = ("rank", "host")  # labels of every series


@dataclass(frozen=True)
class Family:
    """A metric. `key` names the figure of its source. A counter's series end in `_total`, as OpenMetrics asks."""

    name: str
    kind: Literal["gauge", "counter"]
    unit: str  # "", "bytes", "seconds" or "ratio"
    key: str
    help: str
    labels: tuple[str, ...] = ()  # beside COMMON; each has few values

    @property
    def series(self) -> str:
        """The name that a query uses."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _gauge(name: str, unit: str, key: str, text: str, *labels: str) -> Family:
    return Family(f"{name}_{unit}" if unit else name, "gauge", unit, key, text, labels)


def _counter(name: str, unit: str, key: str, text: str, *labels: str) -> Family:
    return Family(f"{name}_{unit}" if unit else name, "counter", unit, key, text, labels)


_LMS = (
    _counter("lms_steps", "", "steps", "Optimizer steps."),
    _counter("lms_passes", "", "passes", "Complete passes, from the first live record until none was live."),
    _gauge("lms_limit", "bytes", "limit", "Most bytes that the device may hold."),
    _gauge("lms_budget", "bytes", "budget", "Most saved bytes that may stay on the device."),
    _gauge("lms_floor", "bytes", "floor", "The device's peak if every saved tensor leaves that can."),
    _gauge("lms_peak", "bytes", "peak", "Most bytes that the device has held."),
    _gauge("lms_predicted_peak", "bytes", "predicted_peak", "The peak that the plan foresees."),
    _gauge("lms_saved", "bytes", "saved", "Bytes saved for the backward in the largest pass."),
    _gauge("lms_held_peak", "bytes", "held_peak", "Most saved bytes on the device at once."),
    _counter("lms_swapped_out", "bytes", "swapped_out", "Saved bytes copied off the device."),
    _counter("lms_swapped_in", "bytes", "swapped_in", "Saved bytes copied back."),
    _counter("lms_stall_out", "seconds", "stall_out", "The computation waited for copies out."),
    _counter("lms_stall_in", "seconds", "stall_in", "The computation waited for copies back."),
    _gauge("lms_state", "bytes", "state", "Bytes of state that may move, such as an optimizer's."),
    _gauge("lms_state_held", "bytes", "state_held", "State on the device after the last step."),
    _counter("lms_state_out", "bytes", "state_out", "State copied off the device."),
    _counter("lms_state_in", "bytes", "state_in", "State copied back."),
    _counter("lms_state_stall", "seconds", "state_stall", "The training waited for copies of its state."),
    _gauge("lms_host_peak", "bytes", "host_peak", "Most pinned host memory in use."),
    _gauge("lms_file_peak", "bytes", "file_peak", "Most bytes in the file tier at once."),
    _counter("lms_misses", "", "misses", "Copies back that no plan had foreseen."),
    _counter("lms_made_room", "", "made_room", "Copies back for which others left: the device was out of memory."),
    _counter("lms_replans", "", "replans", "Plans that were made again with other decisions."),
    _gauge("lms_step", "seconds", "step_time", "Median time from step to step, of the last 1000."),
    _gauge("lms_step_busy", "seconds", "step_busy", "Time of a step in which the device computed, median."),
    _gauge("lms_predicted_step", "seconds", "predicted_step_time", "Time of a step that the plan foresees."),
    _counter("lms_hook", "seconds", "hook_time", "Time in LMS's own code, waiting left out."),
    _gauge("lms_advice", "", "advice", "Advice that holds now: the figure it rests on.", "rule", "option"),
)

_DDL = (
    _gauge("ddl_ranks", "", "ranks", "Ranks of the job now."),
    _counter("ddl_collectives", "", "calls", "Collectives that have finished."),
    _counter("ddl_collective", "bytes", "bytes", "Bytes of their buffers."),
    _counter("ddl_timed_collectives", "", "timed", "Collectives that were timed: of 64 KiB or more, among all ranks."),
    _counter("ddl_collective", "seconds", "seconds", "Time in which a timed collective was in flight."),
    _counter("ddl_least", "seconds", "least_seconds", "Time that the measured links need for the timed collectives."),
    _gauge("ddl_bound", "ratio", "bound", "Share of the bound: that time over the time they took, since the start."),
    _counter("ddl_wait", "seconds", "waited", "Timed collectives waited for the first message of a rank.", "peer"),
    _counter("ddl_late_collectives", "", "late", "Timed collectives that waited for a rank half their time.", "peer"),
    _gauge("ddl_advice", "", "advice", "Advice that holds now: the figure it rests on.", "rule", "option"),
)

FAMILIES = (*_LMS, *_DDL)
BY_NAME = {family.name: family for family in FAMILIES}


def sample_of(prefix: str, figures: Mapping[str, Figure]) -> Sample:
    """The sample of a source whose families begin with `prefix`; figures that are None or have no family are left out.

    Raises ValueError if a figure has other labels than its family.
    """
    sample: Sample = {}
    for family in FAMILIES:
        figure = figures.get(family.key) if family.name.startswith(f"{prefix}_") else None
        if figure is None:
            continue
        values = figure if isinstance(figure, Mapping) else {(): figure}
        if any(len(labels) != len(family.labels) for labels in values):
            raise ValueError(f"{family.name}: expected a value for each set of {family.labels}, found {list(values)}")
        sample[family.name] = [(list(labels), float(value)) for labels, value in values.items()]
    return sample
