"""Strangers at every port that a job opens: they cannot hold it up, make it wrong, or reach it from another host."""

from __future__ import annotations

import pytest

from strangers import Attack, Outcome, attacks, campaign, judge, run, table

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_testbed")]


@pytest.mark.parametrize(
    "attack",
    [
        Attack("silence", "start", "h0", "user"),  # which held a job up for ever
        Attack("drip", "start", "h0,h1", "network"),  # so did this
        Attack("garbage", "start", "h0", "network"),
        Attack("silence", "run", "h0,h1", "network"),
    ],
    ids=str,
)
def test_a_stranger_disturbs_no_job(attack: Attack) -> None:
    outcome = run(attack)
    assert not outcome.problems, (outcome.problems, outcome.output)
    assert outcome.ports > 0
    # From another host nothing of a job on one host can be reached.
    assert (outcome.connected == 0) == (attack.hosts == "h0" and attack.who == "network")


def test_a_campaign_that_finds_something_says_so() -> None:
    attack = Attack("garbage", "run", "h0", "user")
    bad = Outcome(attack, status=1, addresses={"0.0.0.0"}, output="rank 0: a wrong sum")
    judge(bad, ["python loop.py"])
    assert bad.problems == ["a wrong sum", "status 1", "left: python loop.py", "it listened at 0.0.0.0"]
    hung = Outcome(attack, output="")
    assert "none" in list(table([hung]))[-1]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_stranger_disturbs_any_job(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{len(attacks())} attacks", flush=True)
        outcomes = campaign(lambda line: print(line, flush=True))
        print("\n".join(table(outcomes)))
    assert [(str(one.attack), one.problems, one.output) for one in outcomes if one.problems] == []
