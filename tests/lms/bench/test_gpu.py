"""What the benchmark on a GPU calls wrong."""

from __future__ import annotations

from typing import Any

import pytest
from gpu import wrong

PLAIN = {"kind": "plain", "times": 2, "bits": ["1"]}
AGAIN = {"kind": "plain-again", "times": 2, "bits": ["1"]}
RIGHT = {"kind": "lms", "times": 2, "bits": ["1"]}
FAILED = {"kind": "lms+recompute", "times": 4, "failed": "OutOfMemoryError: no memory"}


@pytest.mark.parametrize(
    ("name", "cells", "is_wrong"),
    [
        ("gpt1b", [PLAIN, RIGHT, AGAIN], False),
        ("gpt1b", [PLAIN, RIGHT | {"bits": ["2"]}, AGAIN], True),
        ("unet3d", [PLAIN, RIGHT | {"bits": ["2"]}, AGAIN | {"bits": ["3"]}], False),
        ("gpt1b", [PLAIN, RIGHT, FAILED], True),
        ("unet3d", [PLAIN, RIGHT, FAILED], False),
        ("unet3d", [PLAIN, FAILED | {"times": 2}], True),
        ("gpt1b", [PLAIN, {"kind": "checkpoint", "times": 2, "failed": "OutOfMemoryError"}], False),
    ],
)
def test_other_bits_and_failures_are(name: str, cells: list[dict[str, Any]], is_wrong: bool) -> None:
    assert wrong(name, cells) == is_wrong
