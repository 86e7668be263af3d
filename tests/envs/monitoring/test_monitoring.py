"""The dashboard names what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

from lms.metrics.families import COMMON, FAMILIES

FOLDER = Path(__file__).parents[3] / "envs" / "monitoring"
BY_SERIES = {one.series: one for one in FAMILIES}
SERIES = re.compile(r"\b(?:lms|ddl)_\w+")


def dashboard() -> dict:
    return json.loads((FOLDER / "grafana.json").read_text())


def queries() -> list[str]:
    asked = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    return asked + [one["query"] for one in dashboard()["templating"]["list"]]


def test_each_query_names_metrics_that_exist() -> None:
    named = {name for query in queries() for name in SERIES.findall(query)}
    assert named
    assert named <= set(BY_SERIES)


def test_counters_are_shown_by_their_rate_and_gauges_as_they_are() -> None:
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            for name in SERIES.findall(target["expr"]):
                has_rate = f"rate({name}{{" in target["expr"]
                assert has_rate == (BY_SERIES[name].kind == "counter"), target["expr"]


def test_labels_that_are_shown_are_labels_of_the_series() -> None:
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            for name in SERIES.findall(target["expr"]):
                assert shown <= {*COMMON, *BY_SERIES[name].labels}, target


def test_panels_do_not_overlap() -> None:
    cells = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not mine & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        cells |= mine
