"""What holds for every test: which skips are expected, and how random tests behave."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Generator, Mapping

import pytest

# The only reasons to skip that CI accepts, by the words that they begin with. Elsewhere any skip is one line of the
# report; in CI any other is a failure, so that no test is lost without anybody noticing.
EXPECTED_SKIPS: Mapping[str, str] = {
    "no GPU": "CI has none; `make gpu-check` runs these where there is one",
}

if importlib.util.find_spec("hypothesis"):  # a machine that only runs tests/gpu may lack it
    from hypothesis import settings

    # A shared machine's pauses are no failures; a failing example is printed so that it can be run again.
    settings.register_profile("bascule", deadline=None, print_blob=True)
    settings.load_profile("bascule")


@pytest.fixture(scope="session", autouse=True)
def _signals_of_a_login() -> None:
    """nohup, and a shell's background, ignore signals, and so would every process that a test starts and signals."""
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGQUIT, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def needs_testbed() -> None:
    """Skips what uses a virtual cluster (tests/testbed) where this machine cannot have one; the skip says why."""
    from testbed import obstacle  # here, because most tests need none

    if reason := obstacle():
        pytest.skip(reason)


def unexpected_skip(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """The reason of a skip that CI does not accept; None where nothing was skipped or the skip is expected."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return None
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    return None if reason.startswith(tuple(EXPECTED_SKIPS)) else reason


def _fail_if_unexpected(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = unexpected_skip(report) if os.environ.get("CI") == "true" else None
    if reason is not None:
        report.outcome = "failed"
        report.longrepr = (
            f"{report.nodeid}: skipped in CI, unexpectedly: {reason}\n"
            "Let CI install what the test needs (ci/install_tools), or name the reason in EXPECTED_SKIPS (conftest.py)."
        )


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI an unexpected skip of a test is a failure."""
    report = yield
    _fail_if_unexpected(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """In CI an unexpected skip of a whole module is a failure."""
    report = yield
    _fail_if_unexpected(report)
    return report
