"""What holds for every test: which skips are expected, how random tests behave, and what may run beside what."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import random
import resource
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

# Threads of OpenMP sleep until there is work for them, in this process and in its children. By default they keep the
# cores busy while they wait, and other tests need the cores. libgomp reads this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The only reasons to skip that CI accepts, by the words that they begin with. Elsewhere any skip is one line of the
# report; in CI any other is a failure, so that no test is lost without anybody noticing.
EXPECTED_SKIPS: Mapping[str, str] = {
    "no GPU": "CI has none; `make gpu-check` runs these where there is one",
    "no TensorFlow": "`make test-tensorflow` runs these in an environment of its own",
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


@contextmanager
def _files_of_at_most(nbytes: int) -> Generator[None, None, None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    cached, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # Python would leave cut .pyc files behind
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = cached


@pytest.fixture
def files_of_at_most() -> Callable[[int], AbstractContextManager[None]]:
    """What a full disk is, without root: within `files_of_at_most(N)` writes past N bytes of any file are refused."""
    return _files_of_at_most


@pytest.fixture
def free_port() -> int:
    """A TCP port of this machine, and none that the system gives out by itself: another test could get it meanwhile."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(lowest // 2, lowest), 100):
        with suppress(OSError), socket.socket() as one:
            one.bind(("", port))
            return port
    raise AssertionError("no port is free")


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


# What follows is for several workers (pytest-xdist, `make test`); one process runs the tests as they are collected.
HERE = Path(__file__).parent

# A file of tests runs on one worker, so that its fixtures are made once. So does what shares more.
TOGETHER: Mapping[str, tuple[str, ...]] = {
    "a channel, an image, and containers by their names": ("tests/ci/bundle/", "tests/envs/images/"),
    "builds of C++": ("tests/ddl/test_native.py", "tests/ddl/test_modes.py", "tests/ddl/test_mpi_transport.py"),
}


def scope(nodeid: str) -> str:
    """What a test shares its worker with: the tests for which this is the same."""
    shared = (name for name, folders in TOGETHER.items() if nodeid.startswith(folders))
    return next(shared, nodeid.split("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """The scheduler of `--dist loadfile`, less its order, with scopes of our own."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    config.option.loadscopereorder = False  # it begins with what has the most tests, not with what takes longest
    return Scheduling(config, log)


def is_worker(config: pytest.Config) -> bool:
    """True in a process that runs tests beside others."""
    return hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A worker's temporary folders are not in `popen-gw0`: Open MPI takes a "pe" in a path for a word of its own."""
    if is_worker(config):
        config.option.basetemp = str(Path(config.option.basetemp).with_name(config.workerinput["workerid"]))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A worker begins with what is allowed the longest time, and ends with what needs the machine for itself."""
    if not is_worker(config):
        return
    allowed: dict[str, float] = defaultdict(float)
    for item in items:
        for mark in item.iter_markers("timeout"):
            allowed[scope(item.nodeid)] = max(allowed[scope(item.nodeid)], mark.args[0])
    items.sort(key=lambda item: (item.get_closest_marker("alone") is not None, -allowed[scope(item.nodeid)]))


@contextmanager
def _held(path: Path, how: int) -> Generator[None, None, None]:
    """A lock on something that is there anyway, which ends with this process if not before."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
        os.close(descriptor)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """No worker runs another test while one that is marked `alone` runs; its timeout begins when it has the machine."""
    if not is_worker(item.config):
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    with ExitStack() as held:
        with _held(Path(__file__), fcntl.LOCK_EX):  # the queue: who waits for the machine is passed by nobody
            held.enter_context(_held(HERE, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        return (yield)
