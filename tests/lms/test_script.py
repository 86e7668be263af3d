"""Flags of LMS's own in somebody's script."""

import argparse
import re
from contextlib import nullcontext

import pytest

import lms
from lms.errors import UsageError
from lms.options import arguments
from lms.script import add_arguments, from_args


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in arguments():
        monkeypatch.delenv(f"LMS_{option.name.upper()}", raising=False)


def test_the_help_of_a_script_names_every_flag_and_its_variable() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    text = re.sub(r"\s+", " ", parser.format_help())
    for name in (option.name for option in arguments()):
        assert f"--lms-{name.replace('_', '-')}" in text
        assert f"[LMS_{name.upper()}]" in text
    assert "Without a limit, a frac or a budget the frac is 0.9." in text


def test_without_the_lms_flag_a_script_gets_a_context_that_does_nothing() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    context = from_args(parser.parse_args([]))
    assert isinstance(context, nullcontext)
    with context as session:
        assert session is None


def test_a_flag_without_the_lms_flag_is_warned_of() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--lms-limit", "1GB", "--lms-verify"])
    with pytest.warns(UserWarning, match=r"--lms-limit, --lms-verify: without effect, because --lms is not given"):
        from_args(args)


def test_with_the_lms_flag_a_script_gets_a_session_with_its_options() -> None:
    pytest.importorskip("torch")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    context = from_args(parser.parse_args(["--lms", "--lms-budget", "5MB", "--lms-min-size", "1KB"]))
    assert isinstance(context, lms.Session)
    assert (context.options.budget, context.options.min_size) == (5_000_000, 1000)


def test_with_the_lms_flag_a_wrong_value_is_refused_by_its_flag() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(UsageError, match=r"^--lms-frac='2'"):
        from_args(parser.parse_args(["--lms", "--lms-frac", "2"]))
