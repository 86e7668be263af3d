"""Counters of a session, as plain numbers and as text for people."""

from __future__ import annotations

from dataclasses import dataclass

from lms.units import format_size, plural

_STAYED = {
    "kept_small": "below min_size",
    "kept_owned": "kept by the script too",
    "kept_types": "of tensors that are more than plain bytes",
    "kept_device": "on another device",
    "kept_stream": "on another stream",
    "kept_capture": "in a CUDA graph",
}
_LARGE = 0.1  # the least share of the saved bytes that the last line mentions


@dataclass
class Stats:
    """The figures of a session: sizes in bytes, times in seconds; None: not measured (yet).

    `last_*` are of the last complete pass; the other sums run over the whole session.
    """

    steps: int = 0  # optimizer steps seen
    passes: int = 0  # complete passes: from the first live record until none was live
    limit: int | None = None  # most bytes the device may hold
    budget: int | None = None  # most saved bytes that may stay on the device
    floor: int | None = None  # the device's peak with a budget of zero
    peak: int | None = None  # most bytes the device held
    saved: int = 0  # bytes of all records of the largest pass, each storage once
    recorded: int = 0  # bytes of all records of the session, each storage once a pass
    # Bytes that were saved and stay, counted each time that they are saved:
    kept_parameters: int = 0  # parameters and buffers
    kept_small: int = 0  # storages smaller than min_size
    kept_owned: int = 0  # the script keeps them through the backward, so moving them would free nothing
    kept_types: int = 0  # tensors that are more than plain bytes
    kept_device: int = 0  # tensors of another device
    kept_stream: int = 0  # saved on another CUDA stream than the pass's
    kept_capture: int = 0  # saved while a CUDA graph was captured
    held_peak: int = 0  # most saved bytes on the device at once, copies in flight included
    largest: int = 0  # bytes of the largest record
    swapped_out: int = 0
    swapped_in: int = 0
    stall_out: float = 0.0  # computation waited for copies out
    stall_in: float = 0.0  # computation waited for copies back
    state: int = 0  # bytes of optimizers' state, parameters and gradients that may move
    state_held: int = 0  # of these on the device
    state_out: int = 0
    state_in: int = 0
    state_stall: float = 0.0  # the training waited for these copies
    host_peak: int = 0
    file_peak: int = 0
    misses: int = 0  # copies back that no plan had foreseen
    made_room: int = 0  # copies back for which others left, because the device was out of memory
    replans: int = 0
    predicted_peak: int | None = None
    predicted_step_time: float | None = None
    step_time: float | None = None  # seconds from step to step, median of the last 1000
    step_busy: float | None = None  # seconds of that in which the device computed, median
    elapsed: float = 0.0  # seconds from the end of the first step to that of the last
    hook_time: float = 0.0  # seconds spent in LMS's own code, waiting left out
    last_out: int = 0
    last_in: int = 0
    last_stall_out: float = 0.0
    last_stall_in: float = 0.0
    last_seconds: float = 0.0

    def line(self, peak_where: str = "") -> str:
        """The session in one line; `peak_where` tells when the peak was."""
        parts = [plural(self.steps, "step"), plural(self.passes, "pass")]
        if self.peak is not None:
            limit = f" of {format_size(self.limit)} allowed" if self.limit is not None else ""
            where = f" ({peak_where})" if peak_where else ""
            parts.append(f"peak {format_size(self.peak)}{where}{limit}")
        if self.saved or not self.state:
            held = min(self.held_peak, self.saved)  # else with what the script keeps as well
            parts.append(f"saved bytes on the device at most {format_size(held)} of {format_size(self.saved)}")
        if self.swapped_out:
            parts.append(f"swapped {format_size(self.swapped_out)} out, {format_size(self.swapped_in)} back")
            parts.append(f"waited {format_seconds(self.stall_out + self.stall_in)} for it")
        elif not self.state_out:
            parts.append("nothing had to be swapped")
        if self.state:
            parts.append(
                f"{format_size(self.state_held)} of {format_size(self.state)} of state stay, "
                f"{format_size(self.state_out)} went out, {format_size(self.state_in)} came back, "
                f"waited {format_seconds(self.state_stall)} for it"
            )
        return ", ".join(parts + self.stayed())

    def stayed(self) -> list[str]:
        """Saved bytes that cannot be swapped, by reason, if they are a large share of all. Parameters do not count."""
        kept = {why: getattr(self, name) for name, why in _STAYED.items()}
        total = sum(kept.values())
        if total < _LARGE * (total + self.recorded) or not total:
            return []
        shown = sorted(((nbytes, why) for why, nbytes in kept.items() if nbytes >= _LARGE * total), reverse=True)
        reasons = ", ".join(f"{format_size(nbytes)} {why}" for nbytes, why in shown)
        share = total / (total + self.recorded)
        return [f"{share:.0%} of what was saved cannot be swapped (in all {reasons})"]


def format_seconds(seconds: float) -> str:
    """`seconds` for a person: `83 us`, `12.4 ms`, `3.21 s`, `4 min 05 s`."""
    if abs(seconds) < 0.9995e-3:
        return f"{seconds * 1e6:.0f} us"
    if abs(seconds) < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if abs(seconds) < 99.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"
