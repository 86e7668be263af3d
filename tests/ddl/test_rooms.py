"""The rooms of ddl/csrc, and which way their arrows point. docs/ddl.md has the map."""

from __future__ import annotations

import re
from pathlib import Path

CSRC = Path(__file__).parents[2] / "ddl/csrc"
# A room may include what stands before it.
ROOMS = ("base", "schedule", "transport", "forecast", "device", "engine", "measure", "startup", "api")
ALONE = ("bench", "doorkeeper")  # programs of their own: nothing includes them, and they take from base only
PLUGIN = "mpi"  # libddl_mpi.so: nothing includes it, and libddl has no other way to MPI


def test_a_room_includes_only_rooms_that_stand_before_it() -> None:
    found = {path.parent.name for path in CSRC.glob("*/*.*")}
    assert found == {*ROOMS, *ALONE, PLUGIN}
    for path in CSRC.glob("*/*.*"):
        room = path.parent.name
        last = "startup" if room == PLUGIN else room
        allowed = (room, "base") if room in ALONE else (*ROOMS[: ROOMS.index(last) + 1], room)
        for included in re.findall(r'^#include "(\w+)/', path.read_text(), re.MULTILINE):
            assert included in allowed, f"{path.relative_to(CSRC)} includes a file of {included}/"


def test_only_the_plugin_and_the_benchmark_of_mpi_know_mpi() -> None:
    users = {path.parent.name for path in CSRC.glob("*/*.*") if re.search(r"^#include .mpi", path.read_text(), re.M)}
    assert users == {PLUGIN, "bench"}
