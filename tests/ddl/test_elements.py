"""The types of elements are those of ddl.h."""

import re
from pathlib import Path

from ddl.elements import TYPES

HEADER = Path(__file__).parents[2] / "ddl" / "include" / "ddl.h"


def test_names_and_numbers_are_those_of_the_header() -> None:
    found = re.search(r"typedef enum ddl_type .*?\{(.*?)\}", HEADER.read_text(), re.DOTALL)
    assert found
    numbers = {name.lower(): int(number) for name, number in re.findall(r"DDL_(\w+) = (\d+)", found[1])}
    assert numbers == {name: one.number for name, one in TYPES.items()}


def test_a_name_says_how_many_bits() -> None:
    assert all(name.endswith(str(8 * one.nbytes)) for name, one in TYPES.items())
