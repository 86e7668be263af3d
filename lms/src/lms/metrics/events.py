"""TensorBoard's event files: scalars, one record a sample.

The format is two messages of protobuf in TensorFlow's record framing, so writing it takes less than what a package for
it costs: tensorboardX imports PyTorch (4 s, in a process that may train with TensorFlow), and its errors are lost in a
thread of its own, behind a queue that a full disk then blocks.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_VERSION = b"brain.Event:2"  # the first record of every file


class EventFile:
    """One event file in `folder`, which is made if it is missing. Raises OSError, as every method."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        self.path = folder / f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}.bascule"
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  # until close
        self._end = self._file.seek(0, os.SEEK_END)
        try:
            self._append(_double(1, now) + _bytes(3, _VERSION))
        except OSError:
            self.close()
            if not self._end:
                self.path.unlink()  # TensorBoard would show an empty run
            raise

    def write(self, step: int, now: float, scalars: Mapping[str, float]) -> None:
        """One event: `scalars` by tag, at `step` and the time `now` (seconds since 1970)."""
        values = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", value)) for tag, value in scalars.items()
        )
        self._append(_double(1, now) + b"\x10" + _varint(step) + _bytes(5, values))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        record = length + struct.pack("<I", _masked(length)) + event + struct.pack("<I", _masked(event))
        try:
            # A full disk takes a part without an error: the rest then gets it.
            at = 0
            while at < len(record):
                at += self._file.write(record[at:]) or 0
        except OSError:
            self._file.truncate(self._end)  # a reader stops for ever at a record that is not whole
            self._file.seek(self._end)
            raise
        self._end += len(record)


def _double(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _masked(data: bytes) -> int:
    """CRC-32C (Castagnoli), rotated as record files have it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _table()
