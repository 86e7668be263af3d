"""Every option once: keywords, flags and environment variables."""

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

import lms
from lms.errors import UsageError
from lms.options import DEFAULT_FRAC, KINDS, Options, add_flags, arguments, from_flags

NAMES = [option.name for option in arguments()]

# A value of each option other than its default: as text, and as it is read.
GIVEN: dict[str, tuple[str, object]] = {
    "limit": ("12GB", 12_000_000_000),
    "frac": ("0.5", 0.5),
    "budget": ("0", 0),
    "min_size": ("1MiB", 2**20),
    "swap": ("activations", ("activations",)),
    "spill_dir": (".", Path()),
    "host_limit": ("64GB", 64_000_000_000),
    "prefetch": ("3", 3),
    "write_ahead": ("0", 0),
    "recompute": ("1", True),
    "verify": ("1", True),
    "tensorboard": ("runs/a", Path("runs/a")),
    "metrics_port": ("9117", 9117),
    "metrics_address": ("0.0.0.0", "0.0.0.0"),
}


def parse(**given: object) -> Options:
    """Options from keywords alone."""
    return Options.parse(environ={}, **given)


def flags(*argv: str, prefix: str = "--") -> Options:
    """Options from a command line."""
    parser = argparse.ArgumentParser()
    add_flags(parser, prefix)
    return from_flags(parser.parse_args(argv), prefix)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(f"LMS_{name.upper()}", raising=False)


def test_without_anything_given_the_default_share_of_the_device_is_the_limit() -> None:
    options = parse()
    assert options == Options(frac=DEFAULT_FRAC)
    assert options.min_size == 64_000
    assert options.swap == KINDS[:1] == ("activations",)
    assert not options.verify
    assert not options.bounded
    assert options.why == "frac 0.9, the default"


def test_every_option_has_a_value_in_these_tests() -> None:
    assert set(GIVEN) == set(NAMES) == {field.name for field in fields(Options)} - {"why"}


@pytest.mark.parametrize("name", NAMES)
def test_an_option_means_the_same_as_keyword_flag_and_variable(name: str) -> None:
    text, value = GIVEN[name]
    flag = ["--" + name.replace("_", "-"), *([] if value is True else [text])]
    for options in (
        parse(**{name: text}),
        parse(**{name: value}),
        Options.parse(environ={f"LMS_{name.upper()}": text}),
        flags(*flag),
        flags(*[part.replace("--", "--lms-") for part in flag], prefix="--lms-"),
    ):
        assert getattr(options, name) == value


@pytest.mark.parametrize("name", NAMES)
def test_what_is_given_overrules_the_environment(name: str) -> None:
    text, value = GIVEN[name]
    assert getattr(Options.parse(environ={f"LMS_{name.upper()}": "nonsense"}, **{name: text}), name) == value


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_variable_is_none(name: str) -> None:
    assert Options.parse(environ={f"LMS_{name.upper()}": ""}) == parse()


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"limit": "12XB"}, "GiB"),
        ({"limit": 0}, "more than zero"),
        ({"limit": "-1GB"}, "more than zero"),
        ({"limit": -5}, "more than zero"),
        ({"limit": 1.5}, "expected a size of more than zero"),
        ({"limit": True}, "more than zero"),
        ({"frac": 0}, "above 0 and at most 1"),
        ({"frac": "1.01"}, "above 0 and at most 1"),
        ({"frac": -0.5}, "above 0 and at most 1"),
        ({"frac": "nan"}, "above 0 and at most 1"),
        ({"frac": "half"}, "above 0 and at most 1"),
        ({"frac": True}, "above 0 and at most 1"),
        ({"frac": [0.5]}, "above 0 and at most 1"),
        ({"budget": "-1"}, "zero or more"),
        ({"min_size": "big"}, "zero or more"),
        ({"host_limit": 0}, "more than zero"),
        ({"swap": "activations,weights"}, ", ".join(KINDS)),
        ({"swap": ()}, ", ".join(KINDS)),
        ({"swap": 3}, ", ".join(KINDS)),
        ({"prefetch": -1}, "zero or more"),
        ({"prefetch": "soon"}, "zero or more"),
        ({"write_ahead": 1.5}, "zero or more"),
        ({"verify": "perhaps"}, "true"),
        ({"verify": 3}, "true"),
        ({"tensorboard": __file__}, "not a folder"),
        ({"tensorboard": "/dev/null/runs"}, "not a folder"),
        ({"tensorboard": "/proc/runs"}, "expected one that can be written to"),
        ({"tensorboard": ""}, "the path of a folder"),
        ({"metrics_port": 0}, "1 to 65535"),
        ({"metrics_port": "65536"}, "1 to 65535"),
        ({"metrics_port": "http"}, "1 to 65535"),
        ({"metrics_port": True}, "1 to 65535"),
        ({"metrics_address": "localhost"}, "an IP address of this host"),
        ({"metrics_address": ""}, "an IP address of this host"),
        ({"spill_dir": "/nowhere/at/all"}, "does not exist"),
        ({"spill_dir": __file__}, "not a folder"),
        ({"spill_dir": ""}, "the path of a folder"),
        ({"spill_dir": 3}, "the path of a folder"),
        ({"spill_dir": "/proc"}, "no file can be made in it"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_what_is_allowed(given: dict[str, object], allowed: str) -> None:
    ((name, value),) = given.items()
    with pytest.raises(UsageError) as caught:
        parse(**given)
    assert str(caught.value).startswith(f"{name}={value!r}: ")
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("attempt", "spelling"),
    [
        (lambda: parse(min_size="x"), "min_size='x'"),
        (lambda: flags("--min-size", "x"), "--min-size='x'"),
        (lambda: flags("--lms-min-size", "x", prefix="--lms-"), "--lms-min-size='x'"),
        (lambda: Options.parse(environ={"LMS_MIN_SIZE": "x"}), "LMS_MIN_SIZE='x'"),
    ],
)
def test_an_error_names_the_option_as_it_was_given(attempt: Callable[[], Options], spelling: str) -> None:
    with pytest.raises(UsageError, match=f"^{spelling}: "):
        attempt()


def test_recomputation_without_swapping_what_is_saved_is_refused_by_both_names() -> None:
    with pytest.raises(UsageError, match=r"^recompute: has no effect with swap='optimizer'"):
        parse(recompute=True, swap="optimizer")


@pytest.mark.parametrize("pair", [("limit", "frac"), ("limit", "budget"), ("frac", "budget")])
def test_two_bounds_are_refused_by_both_names(pair: tuple[str, str]) -> None:
    first, second = pair
    with pytest.raises(UsageError) as caught:
        parse(**{name: GIVEN[name][0] for name in pair})
    for part in (f"{first}=", f"{second}=", "at most one of limit, frac, budget"):
        assert part in str(caught.value)


def test_two_bounds_in_the_environment_are_refused_by_their_variables() -> None:
    with pytest.raises(UsageError, match=r"LMS_LIMIT='1GB' and LMS_BUDGET='0'"):
        Options.parse(environ={"LMS_LIMIT": "1GB", "LMS_BUDGET": "0"})


def test_a_bound_that_is_given_overrules_every_bound_in_the_environment() -> None:
    options = Options.parse(environ={"LMS_LIMIT": "1GB", "LMS_FRAC": "0.5"}, budget=7)
    assert (options.limit, options.frac, options.budget) == (None, None, 7)


def test_the_reason_says_where_the_bound_came_from() -> None:
    assert parse(limit="1GB").why == "limit given"
    assert Options.parse(environ={"LMS_FRAC": "0.5"}).why == "from LMS_FRAC"
    assert parse(limit="1GB").bounded


def test_kinds_are_taken_once_and_in_order() -> None:
    assert parse(swap=" activations , activations").swap == ("activations",)


def test_a_keyword_that_is_no_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"^'limits' is no option of LMS"):
        parse(limits=3)


def test_a_spill_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    assert parse(spill_dir=tmp_path).spill_dir == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_keywords_give_the_same_options_again(tmp_path: Path) -> None:
    options = parse(budget=0, min_size=1, spill_dir=tmp_path, prefetch=2, verify=True)
    assert parse(**options.keywords()) == options


BLOCKED = """
import sys
for name in ("torch", "numpy", "matplotlib", "jinja2"):
    sys.modules[name] = None  # makes every import of it fail
import lms
"""


def without_frameworks(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process in which no framework can be imported."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code, *argv],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(Path(lms.__file__).parents[1])},
    )


def test_the_package_and_its_options_work_without_any_framework() -> None:
    done = without_frameworks(
        "print(lms.Options.parse(limit='1GB').limit, lms.LimitError.exit_status, lms.__version__)"
    )
    assert done.stderr == ""
    assert done.stdout.split()[:2] == ["1000000000", "3"]


def test_a_name_that_needs_a_framework_says_which_is_missing_when_it_is_used() -> None:
    done = without_frameworks("lms.LMS")
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr
    assert "torch" in done.stderr.splitlines()[-1]


def test_the_package_offers_what_it_documents_and_nothing_by_accident() -> None:
    assert set(lms.__all__) <= set(dir(lms))
    assert lms.Options is Options
    assert lms.UsageError is UsageError
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        lms.Nonsense  # noqa: B018
