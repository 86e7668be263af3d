"""-lms and -lms_frac: LMS with the meaning that Caffe-IBM's flags had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from bascule_caffe.errors import CaffeError
from bascule_caffe.log import Log


class Memory:
    """Swaps saved tensors of at least `kilobytes` KiB.

    `fraction` was a threshold in Caffe-IBM: the share of the device's memory at which swapping starts. Here it is a
    limit, 0 a budget of nothing. If the net cannot be trained within the limit, training goes on with everything
    swapped. Without a fraction, LMS_LIMIT, LMS_FRAC and LMS_BUDGET count, and 0 is the default. Raises CaffeError for
    another fraction.
    """

    def __init__(self, kilobytes: int, fraction: float | None = None) -> None:
        if fraction is not None and not 0 <= fraction <= 1:
            raise CaffeError(f"-lms_frac is {fraction:g}: give a share of the memory, from 0 to 1")
        self._arguments: dict[str, Any] = {"min_size": f"{kilobytes}KiB"}
        elsewhere = any(os.environ.get(name) for name in ("LMS_LIMIT", "LMS_FRAC", "LMS_BUDGET"))
        if fraction:
            self._arguments["frac"] = fraction
        elif fraction == 0 or not elsewhere:
            self._arguments["budget"] = 0
        self._stack: ExitStack | None = None
        self._trained: tuple[torch.nn.Module, torch.optim.Optimizer] | None = None
        self.session: Any = None  # while training: the session of LMS

    @contextmanager
    def swapping(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """A session for the training inside. Raises the errors of LMS."""
        self._trained = (net, optimizer)
        with ExitStack() as self._stack:
            self._enter()
            yield

    def relax(self, error: MemoryError, log: Log) -> bool:
        """Go on above the limit, with everything swapped; False if everything was swapped already."""
        if "frac" not in self._arguments or self._stack is None:
            return False
        log.warn("lms", f"-lms_frac {self._arguments.pop('frac')}: {error}. Going on with everything swapped")
        self._arguments["budget"] = 0
        self._stack.close()
        self._enter()
        return True

    def _enter(self) -> None:
        import lms

        assert self._trained is not None
        assert self._stack is not None
        self.session = self._stack.enter_context(lms.LMS(*self._trained, **self._arguments))
