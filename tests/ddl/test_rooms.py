"""The rooms of ddl/csrc, and which way their arrows point. docs/ddl.md has the map."""

from __future__ import annotations

import re
from pathlib import Path

CSRC = Path(__file__).parents[2] / "ddl/csrc"
# A room may include what stands before it.
ROOMS = ("base", "schedule", "transport", "forecast", "device", "engine", "measure", "startup", "api")
ALONE = ("bench", "doorkeeper")  # programs of their own: nothing includes them, and they take from base only


def test_a_room_includes_only_rooms_that_stand_before_it() -> None:
    found = {path.parent.name for path in CSRC.glob("*/*.*")}
    assert found == {*ROOMS, *ALONE}
    for path in CSRC.glob("*/*.*"):
        room = path.parent.name
        allowed = (room, "base") if room in ALONE else ROOMS[: ROOMS.index(room) + 1]
        for included in re.findall(r'^#include "(\w+)/', path.read_text(), re.MULTILINE):
            assert included in allowed, f"{path.relative_to(CSRC)} includes a file of {included}/"
