import optuna
import pytest

from lms.errors import LMSError, UsageError
from lms.tune.study import check_url, chosen


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("journal.log", "no heartbeats"),
        ("journal+file:///a", "no heartbeats"),
        ("redis://host", "no heartbeats"),
        ("search.db", "no URL"),
        ("sqlite:///:memory:", "would end with this process"),
    ],
)
def test_what_cannot_hold_a_search_is_refused_with_the_reason(url: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_url(url)


def test_samplers_and_pruners_are_found_by_name_with_their_arguments() -> None:
    assert isinstance(chosen(optuna.samplers, "Sampler", "tpe"), optuna.samplers.TPESampler)
    assert isinstance(chosen(optuna.samplers, "Sampler", "RandomSampler:seed=1"), optuna.samplers.RandomSampler)
    pruner = chosen(optuna.pruners, "Pruner", "threshold:upper=2.5,n_warmup_steps=3")
    assert isinstance(pruner, optuna.pruners.ThresholdPruner)
    assert (pruner._upper, pruner._n_warmup_steps) == (2.5, 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("best", "unknown; Optuna has cmaes"),
        ("grid", "unknown"),
        ("random:speed=1", "speed"),
        ("random:seed=", "invalid syntax"),
        ("random:seed=open('x')", "malformed"),
    ],
)
def test_a_sampler_that_cannot_be_made_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        chosen(optuna.samplers, "Sampler", text)


def test_a_database_that_cannot_be_opened_is_an_error_without_its_password(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    from lms.tune import study

    monkeypatch.setattr(study, "_PAUSE", 0)
    with pytest.raises(LMSError, match="cannot be opened") as refused:
        study.Study(f"sqlite:///{tmp_path}/no/folder/a.db", "a", 30, sampler="tpe", pruner="nop")
    assert "unable to open database file" in str(refused.value)
    with pytest.raises(UsageError, match=r"'nosuch://me:\*\*\*@host/base'"):
        study.Study("nosuch://me:secret@host/base", "a", 30, sampler="tpe", pruner="nop")
