"""Who started this process."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("tensorflow", reason="no TensorFlow")

from ddl.errors import LaunchError
from ddl.tensorflow import is_known
from ddl.tensorflow.job import check_launcher
from ddl.tensorflow.optimizer import difference


@pytest.mark.parametrize(
    "environment",
    [{"HOROVOD_SIZE": "2"}, {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"index": 0}})}],
)
def test_another_launcher_is_an_error_that_says_what_to_run(environment: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match=r"names 2 ranks.*start them with `ddlrun -np 2 python"):
        check_launcher(environment)


def test_no_launcher_is_said_with_what_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    check_launcher({"TF_CONFIG": "not json"})
    assert "no launcher started this process: it trains alone; try `ddlrun -np 4 python" in capsys.readouterr().err


@pytest.mark.parametrize("environment", [{"OMPI_COMM_WORLD_RANK": "0"}, {"WORLD_SIZE": "2", "HOROVOD_SIZE": "2"}])
def test_ddls_launchers_need_no_words(environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    check_launcher(environment)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("version", "known"), [("2.15.1", False), ("2.16.2", True), ("2.21.0", True), ("2.22.0rc1", False)]
)
def test_a_version_outside_of_the_range_is_not_known(version: str, known: bool) -> None:
    assert is_known(version) is known


def test_a_difference_between_models_names_both() -> None:
    one, other = ("a", "float32", (3, 4)), ("b", "float32", (3, 5))
    text = difference([one, one], [one, other], 0, 2)
    assert "variable 2 of 2 on rank 0 is a (float32 of shape (3, 4))" in text
    assert "variable 2 of 2 on rank 2 is b (float32 of shape (3, 5))" in text
    fewer = difference([one, one], [one], 0, 1)
    assert "rank 1's has 1 variables" in fewer
    assert "give each variable a gradient on all ranks or on none" in fewer
