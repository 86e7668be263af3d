"""How much of what is paged, parameters, gradients and optimizers' state, may be on the device at once."""

from __future__ import annotations

from lms.memory.device import Device
from lms.runtime.planner import PassPlanner
from lms.runtime.recorder import Recorder

_STEADY = 1 / 64  # of the limit: by so much the room may be off before it is changed, because plans depend on it


class PagedRoom:
    """Divides the limit between what is paged and all else, which is measured: saved tensors, scratch.

    All saved tensors come first. What is paged gets the rest, and at least `least` bytes. The device counts that room
    as in use, as far as it can be filled: plans do not depend on what is in it.
    Above that room the pager fills what nothing else uses at the moment.
    """

    def __init__(self, planner: PassPlanner, device: Device, *, least: int) -> None:
        self._planner = planner
        self._device = device
        self._least = least
        self._in_pass = 0  # most bytes of all else in a pass, if no saved tensor leaves
        self._seen: Recorder | None = None
        self._margin = 0  # by how much steps of the optimizer went over the limit although less was foreseen
        self.now = least
        self._reserve(0)
        if planner.limit is not None:  # nothing is known of the first step, so the half of what is free
            self.now = max(least, (planner.budget.planned(0) - device.current()) // 2)

    def begin(self, nbytes: int) -> None:
        """`nbytes` may be paged so far."""
        self._reserve(min(self.now, nbytes))

    def after_step(self, nbytes: int) -> None:
        """A step has ended, and its passes are known: the next one has the room that this one shows to be there.

        `nbytes` are all that may be paged.
        """
        planner, device = self._planner, self._device
        if planner.limit is None:
            return
        last, in_pass = planner.last, 0
        if last is not None and last.recorder.measure and last.recorder is not self._seen:
            self._seen, in_pass = last.recorder, last.recorder.peak  # the planner answers for that
            unheld = max(0, planner.client.wanted - last.held_peak)
            self._in_pass = last.recorder.in_use_peak - self._reserved + unheld
        peak = device.peak()
        self._margin += max(0, min(planner.budget.over(peak.held), peak.held - in_pass))
        between = peak.in_use - self._reserved + self._margin
        room = max(self._least, planner.budget.planned(0) - max(self._in_pass, between))
        if room < self.now or room > self.now + planner.limit * _STEADY:
            self.now = room
        self._reserve(min(self.now, nbytes))

    def in_step(self, scratch: int) -> int:
        """The room before a part of an optimizer's step, which makes state the first time and uses `scratch` bytes."""
        planner, device = self._planner, self._device
        if planner.limit is None:
            return self.now
        free = planner.budget.planned(0) - (device.current() - self._reserved) - scratch
        return max(self._least, min(self.now, free))

    def close(self) -> None:
        """Nothing is paged any more."""
        self._device.reserved = None

    def _reserve(self, nbytes: int) -> None:
        self._reserved = self._device.reserved = nbytes
