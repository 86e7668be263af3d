import pytest

import ddl
from ddl.planning import interface
from ddl.planning.interface import Plan, Tier, Tree

TWO_RACKS = Tree((Tier(2, 5e-6, 2e9), Tier(2, 1e-4, 25e6), Tier(2, 1e-4, 12.5e6)))


def test_a_forecast_agrees_with_the_bounds() -> None:
    forecast = interface.forecast(TWO_RACKS, 1 << 24)
    bounds = interface.bounds(TWO_RACKS, 1 << 26)
    assert bounds.cut == pytest.approx((1 << 26) / 12.5e6)
    assert bounds.cut < forecast.seconds < 1.05 * bounds.cut
    assert (forecast.plan, forecast.symmetric) == ("r:2x2x2", True)
    assert forecast.tier_bytes == pytest.approx([1 << 26, 1 << 25, 1 << 24], rel=1e-4)


def test_the_library_s_choice_is_the_first_alternative() -> None:
    found = interface.alternatives(TWO_RACKS, 1 << 24)
    assert found[0] == interface.forecast(TWO_RACKS, 1 << 24)
    assert [one.seconds for one in found[1:]] == sorted(one.seconds for one in found[1:])
    assert {"r:2x2x2", "r:4x2", "r:2x4", "r:8"} <= {one.plan for one in found}


def test_a_schedule_sends_what_its_forecast_says() -> None:
    plan = Plan("r:2x2x2", chunks=2)
    steps = interface.schedule(TWO_RACKS, 1 << 20, 3, plan=plan)
    forecast = interface.forecast(TWO_RACKS, 1 << 20, plan=plan)
    for tier in range(3):
        sent = [step for step in steps if step.kind == "send" and step.tier == tier]
        assert sum(step.nbytes for step in sent) == pytest.approx(forecast.tier_bytes[tier], rel=1e-4)
        assert len(sent) == forecast.tier_messages[tier]


def test_what_the_library_refuses_is_an_argument_error() -> None:
    with pytest.raises(ddl.ArgumentError, match="4x4 multiply to 16, but there are 8 ranks"):
        interface.forecast(TWO_RACKS, 1024, plan=Plan("r:4x4"))
    with pytest.raises(ddl.ArgumentError, match="tier 1 of the network: its bandwidth is 0"):
        interface.bounds(Tree((Tier(2, 0, 1e9), Tier(2, 0, 0))), 1024)
