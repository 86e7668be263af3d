import pytest

from ddl.planning import network, resnet, scaling
from ddl.planning.interface import Tier, Tree


def test_a_step_is_the_compute_time_where_communication_hides_behind_it() -> None:
    tree = Tree((Tier(4, 0, 1e15),))
    cut = resnet.buckets(resnet.resnet50())
    assert scaling.step(tree, cut, None, compute=0.2) == pytest.approx(0.2, rel=1e-4)


def test_a_step_on_a_slow_network_is_communication_after_the_first_bucket() -> None:
    tree = Tree((Tier(2, 0, 1e6),))
    cut = (resnet.Bucket(1_000_000, 0.25), resnet.Bucket(3_000_000, 1.0))
    # The forward pass is a third of 0.3 s, the first gradients are there after a quarter of the rest: 0.15 s.
    assert scaling.step(tree, cut, None, compute=0.3) == pytest.approx(0.15 + 1 + 3, rel=1e-3)


def test_the_table_is_labelled_and_has_the_published_figures_beside_ours() -> None:
    table = scaling.study(network.load("minsky"))
    columns = scaling.speedups(table)
    assert columns["talk (measured by IBM)"] == [1, 2, 3.9, 7.9, 15.5, 30.5, 60.6]
    for label, values in columns.items():
        assert ("SIMULATION" in label) != ("talk" in label)
        assert values[0] == 1
        assert all(value <= 1.001 * gpus / 4 for value, gpus in zip(values, scaling.GPUS, strict=True))
    after, overlapped = (columns[f"ours, {way} (SIMULATION)"] for way in ("after the backward pass", "overlapped"))
    assert all(one <= other + 1e-9 for one, other in zip(after, overlapped, strict=True))
    text = scaling.to_text(table)
    assert text.startswith(scaling.TITLE)
    assert "SIMULATION" in scaling.TITLE
    assert all(source in text for source in scaling.SOURCES)
    assert scaling.to_dict(table)["simulation"] is True
