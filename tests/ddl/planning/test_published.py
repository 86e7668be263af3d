import pytest

from ddl.planning import published


@pytest.fixture(scope="module")
def rows() -> list[published.Row]:
    return published.study()


def test_every_published_system_has_its_forecast_and_its_source(rows: list[published.Row]) -> None:
    ranks = {row.system.name: row.ranks for row in rows}
    assert ranks["IBM, PowerAI DDL"] == 256
    assert ranks["ORNL, Summit, 144"] == 144 * 6
    for row in rows:
        assert row.system.source
        assert 0.5 < row.after <= row.overlapped <= 1 + 1e-9
        assert row.overlapped_seconds <= row.after_seconds
    text = published.to_text(rows)
    assert "FORECAST, not measured" in text.splitlines()[0]
    assert all(row.system.source in text for row in rows)
    assert published.to_dict(rows)["simulation"] is True


def test_a_slower_link_lowers_the_forecast() -> None:
    (system,) = [one for one in published.SYSTEMS if one.link]
    assert system.network.levels[1].bandwidth == pytest.approx(50e9 / 8)
    (row,) = published.study([system])
    faster = published.System(**{**vars(system), "link": None})
    assert published.study([faster])[0].after > row.after + 0.02
