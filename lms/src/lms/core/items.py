"""The stepper's items: the tensors of the step under way, their states, their copies, and who moves them. Pure."""

from __future__ import annotations

import enum
from typing import Literal, Protocol, TypeVar

from lms.errors import LMSError


class State(enum.Enum):
    """Where a tensor's bytes are."""

    HERE = enum.auto()  # on the device
    LEAVING = enum.auto()  # there still, with a copy out in flight
    AWAY = enum.auto()  # in the tier below only
    COMING = enum.auto()  # a copy back in flight
    DEAD = enum.auto()  # freed; its memory is, too, once its copies in flight are complete


class DeviceFull(Exception):
    """The device has no memory for a tensor that is to come back. The cause is the framework's own error."""


class Copy(Protocol):
    """A copy in flight."""

    @property
    def failed(self) -> LMSError | None:
        """Why it failed; None if it has not."""
        return None

    def done(self) -> bool:
        """Whether it is complete, or has failed. Never blocks."""

    def wait(self) -> None:
        """Have the computation wait until it is complete. Raises its error if it failed."""
        return None

    def synchronize(self) -> None:
        """Block this thread until it is complete. Raises its error if it failed."""
        return None


class Item:
    """A tensor of the step under way, as the stepper knows it."""

    __slots__ = ("arrival", "departure", "held", "index", "nbytes", "pinned", "state", "stored")

    def __init__(self, index: int, nbytes: int, state: State = State.HERE) -> None:
        self.index = index  # within its step, in the order of first accesses; negative once its step is over
        self.nbytes = nbytes
        self.state = state
        self.held = 0  # bytes that LMS keeps on the device for it
        self.pinned = False  # another owner outlives the step, so there is nothing to gain
        self.stored = False  # the tier below holds its bytes, or is about to
        self.departure: Copy | None = None
        self.arrival: Copy | None = None


M = TypeVar("M", bound=Item, contravariant=True)


class Mover(Protocol[M]):
    """Carries out what the stepper decides."""

    def offload(self, item: M) -> Copy | None:
        """Start the copy out. None: it must stay."""

    def reload(self, item: M) -> Copy | None:
        """Start the copy back. None: they are there at once. Raises DeviceFull, and nothing has begun then."""

    def wait(self, item: M, lane: Literal["out", "back"]) -> None:
        """Have the computation wait for the item's departure ("out") or arrival ("back"). Raises the copy's error."""

    def release(self, item: M) -> None:
        """Give up the item's memory: the tier below holds the bytes."""
        return None

    def discard(self, item: M) -> None:
        """Forget the bytes in the tier below."""
        return None

    def forget(self, item: M) -> None:
        """The item was freed, and no copy uses its memory any more."""
        return None
