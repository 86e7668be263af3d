"""What the makers' numbers mean in bytes a second."""

from __future__ import annotations

import pytest

from lms.link.speeds import NVLINK_VERSIONS, nvlink_rate, pcie_rate


@pytest.mark.parametrize(
    ("generation", "width", "rate"),
    [
        (1, 16, 4.0),
        (2, 16, 8.0),
        (3, 16, 15.75),
        (4, 16, 31.5),
        (5, 16, 63.0),
        (6, 16, 121.0),
        (3, 8, 7.88),
        (4, 4, 7.88),
    ],
)
def test_pcie_by_generation_and_width(generation: int, width: int, rate: float) -> None:
    assert pcie_rate(generation, width) == pytest.approx(rate * 1e9, rel=1e-3)


def test_a_generation_that_is_not_known_has_no_rate() -> None:
    assert pcie_rate(9, 16) is None


def test_nvmls_numbers_are_no_versions() -> None:
    assert NVLINK_VERSIONS[4] == "3.0"
    assert NVLINK_VERSIONS[6] == "4.0"


@pytest.mark.parametrize(("version", "rate"), [("1.0", 20e9), ("2.0", 25e9), ("4.0", 25e9), ("5.0", 50e9), ("", None)])
def test_nvlink_by_version(version: str, rate: float | None) -> None:
    assert nvlink_rate(version) == rate
