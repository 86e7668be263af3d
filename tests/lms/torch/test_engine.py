"""Calibration, which is the same for every engine."""

from __future__ import annotations

import pytest
import torch

from lms.errors import SpillError
from lms.torch import engine as engine_module
from lms.torch.engine import Engine


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_PIECE", 100)


@pytest.mark.parametrize(
    ("nbytes", "pieces"), [(250, [100, 100, 50]), (200, [100, 100]), (100, [100]), (7, [7]), (0, [1])]
)
def test_so_many_bytes_go_out_and_come_back_in_pieces(nbytes: int, pieces: list[int], tier: object) -> None:
    assert Engine.calibrate(tier, nbytes) == tier.link()
    assert (tier.offloads, tier.reloads) == (pieces, pieces)
    assert tier.slots == {}


@pytest.mark.parametrize("way", ["offload", "reload"])
def test_each_copy_is_waited_for_before_the_next_one_starts(
    way: str, tier: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.slow = True
    copies = []
    start = getattr(tier, way)

    def watched(argument: object) -> object:
        assert all(copy.done() for copy in copies)
        result = start(argument)
        copies.append(result[1])
        return result

    monkeypatch.setattr(tier, way, watched)
    Engine.calibrate(tier, 300)
    assert len(copies) == 3
    assert all(copy.done() for copy in copies)


def test_the_bytes_are_noise_of_the_systems_and_the_users_random_numbers_stay(tier: object) -> None:
    seen = []
    tier.during = lambda: seen.append(bytes(next(reversed(tier.slots.values()))[1].tolist()))
    state = torch.get_rng_state()
    for _ in range(2):
        Engine.calibrate(tier, 100)
    assert torch.equal(torch.get_rng_state(), state)
    first, second = seen
    assert first != second
    assert len(set(first)) > 30, "100 random bytes have some 83 values"


@pytest.mark.parametrize("how", ["full", "broken"])
def test_a_tier_that_fails_raises_and_keeps_nothing(how: str, tier: object) -> None:
    setattr(tier, how, True)
    with pytest.raises(SpillError, match=how):
        Engine.calibrate(tier, 250)
    assert tier.slots == {}
