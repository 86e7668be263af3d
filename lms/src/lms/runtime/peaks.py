"""Where the device's peak was, and whether it went over the limit."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from lms.core.budget import Budget
from lms.errors import LimitError
from lms.memory.device import Device
from lms.runtime.progress import Progress
from lms.runtime.recorder import Recorder
from lms.units import format_size
from lms.warn import warn_script

_MORE = 1 + 1 / 256  # how much higher a peak is than another that is worth telling apart


class Peaks:
    """The most bytes that the device held, pass by pass and between passes.

    From the second step on each peak over the limit counts: `over` is by how many bytes the highest went over it.
    """

    def __init__(self, device: Device, budget: Budget, progress: Progress) -> None:
        self.device = device
        self.progress = progress
        self.budget = budget
        self.most = 0
        self.where = ""  # when that, or nearly that, was held first, and in which module
        self._noted = 0
        self.over = 0
        self.exceeded_lately = False  # by the last peak that was read
        self._steps = 0  # of the optimizer, when the pass under way began
        self._warned = False
        self._peak_is_between = False  # the device's peak is that of the time since the last pass
        self._before_pause = 0  # bytes that the time between two passes needed until it was paused
        self._between = 0  # how often in a row the time between two passes alone needed more than the limit
        self._most_between = 0  # in use between two passes
        self._pauses = 0  # that are under way, one inside another
        self._closed = False

    @property
    def between(self) -> int:
        """The most bytes that were in use between two passes, the optimizer's step included.

        0 before a measured pass has ended. Pauses and the measuring of a link do not count.
        """
        most = max(self._most_between, self._before_pause)
        return max(most, self.device.peak().in_use) if self._peak_is_between and not self._pauses else most

    def before_a_pass(self) -> LimitError | None:
        """Note what the time since the last pass needed; the reason to end the training, if there is one.

        The first such time may be a warm-up, so early in the training the second is the reason.
        """
        peak = self.device.peak()
        passes = self.progress.passes
        self._saw(
            peak.held, f"after pass {passes}, outside forward and backward" if passes else "before the first pass"
        )
        self._steps = self.progress.steps
        in_use = max(peak.in_use, self._before_pause)
        self._most_between = self.between
        between, self._peak_is_between, self._before_pause = self._peak_is_between, False, 0
        if not between or not self.budget.over(in_use):
            self._between = 0
            return None
        self._between += 1
        if not self.progress.early or self._between < 2:
            return None
        limit = format_size(self.budget.limit or 0)
        return LimitError(
            f"limit {limit} is too low: between two passes, with nothing saved, the process needs "
            f"{format_size(in_use)} (the optimizer's step, an evaluation, loading data). Raise the limit to "
            f"{format_size(in_use * 1.02)} or more"
        )

    def after_a_pass(self, recorder: Recorder) -> None:
        """Note what the pass needed that ended just now."""
        module = f", module {recorder.peak_module!r}" if recorder.peak_module else ""
        self._saw(recorder.peak, f"pass {self.progress.passes}{module}")
        self._peak_is_between = recorder.measure and not self._closed

    def after_a_step(self) -> None:
        """Note what a step needed, forward, backward and optimizer, if no passes are recorded."""
        self._saw(self.device.peak().held, f"step {self.progress.steps + 1}")
        self._steps = self.progress.steps + 1
        self.device.reset_peak()

    def after_the_last_pass(self) -> None:
        """Note what the time since the last pass has needed so far."""
        self._saw(self.device.peak().held, f"after pass {self.progress.passes}")

    def close(self) -> None:
        """Look at the device for the last time."""
        self.after_the_last_pass()
        self._most_between, self._peak_is_between, self._closed = self.between, False, True

    def pause(self) -> None:
        """Note what the time since the last pass has needed, before something that does not concern LMS."""
        self.after_the_last_pass()
        if self._peak_is_between:
            self._before_pause = self.between
        self._pauses += 1
        self.device.reset_peak()

    def resume(self, what: str = "in a pause") -> None:
        """Note what a pause needed. It counts as a peak, and neither ends the training nor has a pass measured."""
        lately = self.exceeded_lately
        self._saw(self.device.peak().held, f"{what} after pass {self.progress.passes}")
        self.exceeded_lately = lately
        self._pauses -= 1
        self.device.reset_peak()

    @contextmanager
    def apart(self, what: str) -> Generator[None, None, None]:
        """Between two passes, pause. Inside one, the peak is the pass's, and nothing is done."""
        if not self._peak_is_between:
            yield
            return
        self.pause()
        try:
            yield
        finally:
            self.resume(what)

    def _saw(self, held: int, where: str) -> None:
        self.most = max(self.most, held)
        if held > self._noted * _MORE:
            self._noted, self.where = held, where
        begun = self._steps >= 1 if self.progress.steps else self.progress.trained >= 2
        over = self.budget.over(held)
        self.exceeded_lately = over > 0
        if not over or not begun:
            return
        if not self._warned and not self.progress.early:
            self._warned = True
            limit = format_size(self.budget.limit or 0)
            warn_script(f"the device held {format_size(held)} ({where}), more than the limit of {limit}")
        self.over = max(self.over, over)
