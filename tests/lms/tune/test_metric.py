from pathlib import Path

import pytest

from lms.errors import UsageError
from lms.tune.metric import Log, Reading, expression, named, reading


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("val_loss: 0.125", 0.125),
        ("epoch 3: loss=9, val_loss=1.25e-1", 0.125),
        ('{"epoch": 3, "val_loss": 0.125, "loss": 9}', 0.125),
        ("Val_Loss   .125", 0.125),
        ("my_val_loss: 9 val_loss: +0.125", 0.125),
        ("val_loss: -inf", float("-inf")),
        ("my_val_loss: 9", None),
        ("val_loss_ema: 9", None),
        ("val_loss: none", None),
    ],
)
def test_a_metric_is_found_by_its_name(line: str, value: float | None) -> None:
    found = reading(line, named("val_loss"), before=0)
    assert (found and found.value) == value


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("epoch 12: a=1", 12),
        ('{"a": 1, "step": 7}', 7),
        ("epoch 2, global_step=900: a=1", 900),
        ("a=1", 6),
        ("step 3: a=1", 6),
    ],
)
def test_a_step_is_the_lines_own_if_it_rises(line: str, step: int) -> None:
    assert reading(line, named("a"), before=5) == Reading(step, 1)


def test_an_expression_needs_one_group() -> None:
    assert reading("loss is 0.5 now", expression(r"loss is (\S+)"), 0) == Reading(1, 0.5)
    for wrong, words in ((r"loss is \S+", "0 groups"), ("(", "unterminated")):
        with pytest.raises(UsageError, match=words):
            expression(wrong)


def test_a_log_that_grows_is_read_once_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a=1\rstep 2")
    log = Log(path, named("a"))
    assert log.read() == [Reading(1, 1)]
    with path.open("ab") as file:
        file.write(b"0 a=2\n\xffa=3\na=4")
    assert log.read() == [Reading(20, 2), Reading(21, 3)]
    assert log.read(ended=True) == [Reading(22, 4)]
    assert (log.last, log.tail(1)) == (Reading(22, 4), "a=4")
