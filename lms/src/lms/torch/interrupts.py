"""Ctrl-C while LMS works: it waits until LMS is done.

Python raises KeyboardInterrupt between any two instructions. In a destructor it would be swallowed, and Ctrl-C
would have no effect. In the middle of a hook it would leave a record half moved.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType

_AGAIN = 0.001  # seconds until a signal that came at the wrong time is sent again
_PATIENCE = 5.0  # seconds after which it is let through in any case: a copy may never end

Handler = Callable[[int, FrameType | None], object]


class Shield:
    """Holds SIGINT back while code of these `files`, or one of these functions, runs on the main thread.

    The handler that was there before is called once that code has returned. It costs nothing until a signal comes.
    """

    def __init__(self, files: frozenset[str], codes: frozenset[CodeType] = frozenset()) -> None:
        self._files = files
        self._codes = codes
        self._handler: Handler | None = None
        self._since: float | None = None  # when the signal came that is held back

    def put_up(self) -> None:
        """Begin. Does nothing on another thread than the main one, or if SIGINT is not handled by Python."""
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._receive)

    def take_down(self) -> None:
        """End. A handler that other code has installed meanwhile stays."""
        if signal.getsignal(signal.SIGINT) == self._receive:
            signal.signal(signal.SIGINT, self._handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if self._is_inside(frame) and now - self._since < _PATIENCE:
            # Not by threading.Thread: the code that was interrupted may hold that module's lock.
            _thread.start_new_thread(_send_again, (number,))
            return
        self._since = None
        if self._handler is not None:
            self._handler(number, frame)

    def _is_inside(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_filename in self._files or frame.f_code in self._codes:
                return True
            frame = frame.f_back
        return False


def _send_again(number: int) -> None:
    time.sleep(_AGAIN)
    signal.pthread_kill(threading.main_thread().ident or 0, number)
