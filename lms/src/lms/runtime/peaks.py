"""Where the device's peak was, and whether it went over the limit."""

from __future__ import annotations

from lms.errors import LimitError
from lms.memory.device import Device
from lms.runtime.recorder import Recorder
from lms.units import format_size
from lms.warn import warn_script

_MORE = 1 + 1 / 256  # how much higher a peak is than another that is worth telling apart


class Peaks:
    """The most bytes that the device held, pass by pass and between passes.

    From the second step on each peak above the limit, by more than `tolerance` bytes, counts: `over` is by how much the
    highest of them went over it.
    """

    def __init__(self, device: Device, limit: int | None, tolerance: int) -> None:
        self.device = device
        self.limit = limit
        self.tolerance = tolerance
        self.most = 0
        self.where = ""  # when that, or nearly that, was held first, and in which module
        self._noted = 0
        self.over = 0
        self.exceeded_lately = False  # by the last peak that was read
        self._steps = 0  # of the optimizer, when the pass under way began
        self._warned = False
        self._peak_is_between = False  # the device's peak is that of the time since the last pass
        self._between = 0  # how often in a row the time between two passes alone needed more than the limit

    def before_a_pass(self, passes: int, steps: int, *, early: bool) -> LimitError | None:
        """Note what the time since the last pass needed; the reason to end the training, if there is one.

        The first such time may be a warm-up, so `early` in the training the second is the reason.
        """
        peak = self.device.peak()
        where = f"after pass {passes}, outside forward and backward" if passes else "before the first pass"
        self._saw(peak.held, where, passes, steps, early=early)
        self._steps = steps
        between, self._peak_is_between = self._peak_is_between, False
        if self.limit is None or not between or peak.in_use <= self.limit + self.tolerance:
            self._between = 0
            return None
        self._between += 1
        if not early or self._between < 2:
            return None
        return LimitError(
            f"limit {format_size(self.limit)} is too low: between two passes, with nothing saved, the process needs "
            f"{format_size(peak.in_use)} (the optimizer's step, an evaluation, loading data). Raise the limit to "
            f"{format_size(peak.in_use * 1.02)} or more"
        )

    def after_a_pass(self, recorder: Recorder, passes: int, steps: int, *, early: bool) -> None:
        """Note what the pass needed that ended as number `passes`."""
        module = f", module {recorder.peak_module!r}" if recorder.peak_module else ""
        self._saw(recorder.peak, f"pass {passes}{module}", passes, steps, early=early)
        self._peak_is_between = recorder.measure

    def after_the_last_pass(self, passes: int, steps: int, *, early: bool) -> None:
        """Note what the time since the last pass has needed so far."""
        self._saw(self.device.peak().held, f"after pass {passes}", passes, steps, early=early)

    def _saw(self, held: int, where: str, passes: int, steps: int, *, early: bool) -> None:
        self.most = max(self.most, held)
        if held > self._noted * _MORE:
            self._noted, self.where = held, where
        begun = self._steps >= 1 if steps else passes >= 2
        self.exceeded_lately = self.limit is not None and held > self.limit + self.tolerance
        if self.limit is None or not self.exceeded_lately or not begun:
            return
        if not self._warned and not early:
            self._warned = True
            warn_script(
                f"the device held {format_size(held)} ({where}), more than the limit of {format_size(self.limit)}"
            )
        self.over = max(self.over, held - self.limit)
