"""The bookkeeping benchmark's figures, and its order, with processes that are made up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import bookkeeping
import pytest
from bookkeeping import Turn, measure, row, table
from crew import WorkerError


def test_a_rows_figures_are_microseconds_a_saved_tensor_beyond_plain_of_the_same_round() -> None:
    plain = [Turn(1e-3, 2e-3), Turn(3e-3, 4e-3), Turn(1e-3, 2e-3)]
    took = [Turn(2e-3, 4e-3), Turn(5e-3, 7e-3), Turn(4e-3, 5e-3)]
    found = row(took, plain, saved=100)
    assert (found.pack.median, found.unpack.median) == pytest.approx((20, 30))
    assert found.both.median == pytest.approx(50)
    assert (found.both.least, found.both.most) == pytest.approx((30, 60))


class FakeWorker:
    """Takes as long as its kind and its tree say."""

    log: list[str] = []  # noqa: RUF012 - a fresh list for each test, below

    def __init__(self, config: Mapping[str, object], *, program: Path, source: Path) -> None:
        assert program.name == "saver.py"
        self.name = f"{config['kind']} {source.parents[1].name}"
        self.seconds = {"plain": 1e-3, "identity": 2e-3, "lms": 5e-3}[str(config["kind"])]
        self.seconds += source.parents[1].name == "older"
        self.opening = {"saved": 1000}

    def ask(self) -> dict[str, object]:
        self.log.append(self.name)
        return {"forward": self.seconds, "backward": 0.0}

    def close(self) -> None:
        self.log.append(f"closed {self.name}")


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookkeeping, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "log", [])


def test_all_contestants_take_turns_and_another_trees_lms_is_one_of_them() -> None:
    saved, rows = measure("saves", {"lms": Path("/new"), "older": Path("/older")}, rounds=2)
    own = bookkeeping.ROOT.name
    names = [f"plain {own}", f"identity {own}", "lms new", "lms older"]
    assert FakeWorker.log[:8] == [*names, *names[1:], names[0]]
    assert sorted(FakeWorker.log[8:]) == sorted(f"closed {name}" for name in names)
    assert saved == 1000
    assert {name: one.both.median for name, one in rows.items()} == pytest.approx(
        {"identity": 1.0, "lms": 4.0, "older": 1004.0}
    )


def test_the_target_is_this_trees_lms() -> None:
    saved, rows = measure("saves", {"lms": Path("/new"), "older": Path("/older")}, rounds=1)
    text = table("saves", saved, rows)
    assert "lms            4.00   0.00   4.00" in text
    assert "reached: lms, target 5" in text
    assert "MISSED" in table("saves", saved, {**rows, "lms": rows["older"]})


def test_a_process_that_ends_is_a_message_and_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def ends(_: object) -> dict[str, object]:
        raise WorkerError("the process ended with status 1")

    monkeypatch.setattr(FakeWorker, "ask", ends)
    assert bookkeeping.main(["-o", str(tmp_path)]) == 1
    assert "bookkeeping: the process ended with status 1" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "words"), [("other", "with lms/src/lms in it"), ("lms", "give the checkout another")])
def test_what_is_no_other_checkout_is_refused(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "lms":
        (tmp_path / name / "lms/src/lms").mkdir(parents=True)
    with pytest.raises(SystemExit):
        bookkeeping.main(["--against", str(tmp_path / name)])
    assert words in capsys.readouterr().err
