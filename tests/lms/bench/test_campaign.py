"""The order of a campaign, with processes that are made up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import campaign
import pytest
from campaign import Campaign, Settings, managed, rotations, steps_to_take
from crew import WorkerError
from figures import Step

SETTINGS = Settings("quick", "cpu", 2, 3, (0.5, 0.35, 0.0), Path("/spill"), Path("/swap"), swap=False, refused={})


class FakeWorker:
    """Answers at once, and writes down who computed when."""

    log: list[str] = []  # noqa: RUF012 - a fresh list for each test, below
    failing = ""

    def __init__(self, config: Mapping[str, object], cap: object = None, *, program: Path, source: Path) -> None:
        assert (program.name, program.parents[2]) == ("worker.py", source.parents[1])
        self.config = config
        self.opening = {"memory": "made up"}
        self.name = f"{config['kind']}-{config['budget']}"
        if source.parents[1] != campaign.ROOT:
            self.name += f" of {source.parents[1]}"
        if self.name == self.failing:
            raise WorkerError("the process ended with status 1")

    def step(self) -> Step:
        self.log.append(self.name)
        session = {"saved": 1000.0} if self.config["kind"] == "lms" else {}
        return Step(1.0, 2.0, "0x0p0", "", 1, session=session)

    def close(self) -> None:
        self.log.append(f"closed {self.name}")


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "log", [])


def test_each_round_has_every_cell_once_and_starts_with_another() -> None:
    rounds = list(rotations(["a", "b", "c"], 4))
    assert rounds == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_budgets_are_shares_of_the_bytes_that_the_fitting_session_saved() -> None:
    cells = Campaign("gpt", SETTINGS, lambda _: None).run()
    assert {name: cell.budget for name, cell in cells.items() if cell.kind == "lms"} == {
        "lms-fits": None,
        "lms-50%": 500,
        "lms-35%": 350,
        "lms-0%": 0,
    }
    assert managed(0.25, 1000.0).budget == 250


def test_every_cell_takes_as_many_timed_steps_and_plain_reaches_the_last_step_number_of_all() -> None:
    cells = Campaign("gpt", SETTINGS, lambda _: None).run()
    assert {len(cell.timed) for cell in cells.values()} == {3}
    assert max(len(cell.steps) for cell in cells.values()) == len(cells["plain"].steps)


def test_the_progress_bar_is_told_the_number_of_steps_that_are_taken() -> None:
    labels: list[str] = []
    Campaign("gpt", SETTINGS, labels.append).run()
    assert len(labels) == steps_to_take(SETTINGS, models=1)


def test_a_cell_that_cannot_start_gets_a_note_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWorker, "failing", "lms-350")
    cells = Campaign("gpt", SETTINGS, lambda _: None).run()
    assert "status 1" in cells["lms-35%"].note
    assert cells["lms-35%"].timed == []
    assert len(cells["lms-0%"].timed) == 3


def test_without_plain_there_is_nothing_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWorker, "failing", "plain-None")
    with pytest.raises(WorkerError, match="gpt, plain: the process ended"):
        Campaign("gpt", SETTINGS, lambda _: None).run()


def test_an_allocator_that_is_not_there_is_a_line_and_no_process() -> None:
    settings = replace(SETTINGS, refused={"jemalloc": "libjemalloc is not installed"})
    labels: list[str] = []
    cells = Campaign("gpt", settings, labels.append).run()
    assert (cells["jemalloc"].note, cells["jemalloc"].timed) == ("not run: libjemalloc is not installed", [])
    assert len(cells["pool"].timed) == 3
    assert not any("jemalloc" in entry for entry in FakeWorker.log)
    assert len(labels) == steps_to_take(settings, models=1)


def test_another_checkouts_lms_has_a_cell_beside_each_of_ours() -> None:
    settings = replace(SETTINGS, against=Path("/elsewhere/older"))
    labels: list[str] = []
    cells = Campaign("gpt", settings, labels.append).run()
    assert [name for name in cells if name.startswith("lms")] == [
        "lms-fits", "lms-fits older", "lms-50%", "lms-50% older", "lms-35%", "lms-35% older", "lms-0%", "lms-0% older",
    ]  # fmt: skip
    assert [cell.other for name, cell in cells.items() if name.startswith("lms")] == [False, True] * 4
    assert cells["lms-35% older"].budget == cells["lms-35%"].budget == 350
    assert len(cells["lms-35% older"].timed) == 3
    assert FakeWorker.log.count("lms-350 of /elsewhere/older") == len(cells["lms-35% older"].steps)
    assert FakeWorker.log.count("lms-350") == len(cells["lms-35%"].steps)
    assert len(labels) == steps_to_take(settings, models=1)


def test_every_process_is_closed() -> None:
    cells = Campaign("gpt", SETTINGS, lambda _: None).run()
    assert sum(entry.startswith("closed") for entry in FakeWorker.log) == len(cells)
