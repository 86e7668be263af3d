"""Reads event files by TensorBoard's own messages and checksums."""

from __future__ import annotations

import struct
from pathlib import Path

from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read(path: Path) -> list[Event]:
    """The events of a file; every length and checksum must be right."""
    data, events = path.read_bytes(), []
    while data:
        length, length_crc = struct.unpack("<QI", data[:12])
        assert length_crc == masked(data[:8])
        body = data[12 : 12 + length]
        assert struct.unpack("<I", data[12 + length : 16 + length]) == (masked(body),)
        events.append(Event.FromString(body))
        data = data[16 + length :]
    return events


def scalars(event: Event) -> dict[str, float]:
    return {value.tag: value.simple_value for value in event.summary.value}
