"""Log lines as Caffe's library glog wrote them, because people's scripts read them.

A line is `I1126 00:10:02.123456 12345 solver.cpp:218] Iteration 0, ...`: level, month and day, time, process, the
place in Caffe's sources, text.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime

from torch import Tensor

from bascule_caffe.net import Net


class Log:
    """Writes to stderr; a rank other than 0 writes warnings alone."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def info(self, place: str, text: str) -> None:
        """A line of progress. `place` is the file and line of Caffe that wrote the same text."""
        if self.rank == 0:
            self._write("I", place, text)

    def warn(self, place: str, text: str) -> None:
        """What a user should know: a flag or field that does nothing here, or does something else."""
        self._write("W", place, text)

    def error(self, place: str, text: str) -> None:
        """The error that ends the command."""
        self._write("E", place, text)

    def _write(self, level: str, place: str, text: str) -> None:
        when = datetime.now().astimezone()
        prefix = f"{level}{when:%m%d %H:%M:%S.%f} {os.getpid():5d} {place}] "
        try:
            sys.stderr.write("".join(f"{prefix}{line}\n" for line in text.split("\n")))
            sys.stderr.flush()
        except OSError as error:
            if error.errno != errno.EIO:  # the terminal was closed: SIGHUP says what happens then
                raise


def numbers_of(net: Net, outputs: Mapping[str, Tensor]) -> Iterator[tuple[str, float]]:
    """Each number of each output, in the net's order, with the output's name."""
    for name in net.outputs:
        for value in outputs[name].flatten().tolist():
            yield name, value


def described(net: Net, name: str, value: float) -> str:
    """A number of an output, with its part of the loss."""
    weight = net.loss_weights.get(name, 0)
    loss = f" (* {weight:g} = {weight * value:g} loss)" if weight else ""
    return f"{name} = {value:g}{loss}"
