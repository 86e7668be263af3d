import optuna
import pytest

from lms.errors import UsageError
from lms.target import Target
from lms.tune.parameters import command_line, parse_all


def test_each_kind_is_the_distribution_of_optuna_that_it_names() -> None:
    texts = [
        "lr=loguniform:1e-5:1e-1",
        "drop=uniform:0:0.5",
        "width=int:16:512",
        "batch=logint:1:64",
        "--opt=choice:a,b",
    ]
    kinds = optuna.distributions
    assert {one.name: one.distribution for one in parse_all(texts)} == {
        "lr": kinds.FloatDistribution(1e-5, 1e-1, log=True),
        "drop": kinds.FloatDistribution(0, 0.5),
        "width": kinds.IntDistribution(16, 512),
        "batch": kinds.IntDistribution(1, 64, log=True),
        "opt": kinds.CategoricalDistribution(("a", "b")),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr", "NAME=KIND:VALUES"),
        ("lr=normal:0:1", "a kind of uniform"),
        ("lr=uniform:1", "two numbers"),
        ("lr=uniform:1:1", "ends above 1"),
        ("lr=uniform:0:nan", "finite"),
        ("lr=uniform:-1e308:1e308", "finite"),
        ("lr=loguniform:0:1", "begins above 0"),
        ("width=int:1:2.5", "two whole numbers"),
        ("opt=choice:sgd,sgd", "differ"),
        ("opt=choice:", "differ"),
    ],
)
def test_what_is_no_range_is_refused_with_every_form(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        parse_all([text])
    assert "optimizer=choice:sgd,adam" in str(refused.value)


def test_a_name_that_is_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="'lr' is given twice"):
        parse_all(["lr=uniform:0:1", "lr=uniform:0:2"])


def test_values_go_where_the_script_wants_them() -> None:
    target = Target("{width}/train.py", ("--epochs", "3", "model.lr={lr}"))  # the script's own name is left alone
    words = ["{width}/train.py", "--epochs", "3", "model.lr=-1e-05", "--width=8"]
    assert command_line(target, {"lr": -1e-05, "width": 8}) == words
