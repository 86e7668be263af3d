import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from bundle import plan, tasks
from bundle.errors import BuildError
from bundle.tasks import Task


def package(name: str, builds_with: tuple[str, ...] = (), runs_with: tuple[str, ...] = ()) -> plan.Package:
    return plan.Package(name, "1.0", "0", "linux-64", builds_with, runs_with, (), f"content of {name}")


# A library, two programs that are made of it and run with one another's data, and what installs all.
PACKAGES = (
    package("library"),
    package("left", ("library",), ("library",)),
    package("right", ("library",), ("data",)),
    package("data"),
    package("meta", (), ("left", "right")),
)


def work(*left_out: str) -> list[Task]:
    return tasks.of(plan.steps(PACKAGES, "tools", {}, {}, {}, set(left_out)), PACKAGES)


def named(found: list[Task]) -> list[str]:
    return [f"{'test' if one.test else 'build'} {one.step.package.name}" for one in found]


class Bench:
    """Does every task by noting it; those of `failing` fail. Two at a time wait for each other, if they are `met`."""

    def __init__(self, *failing: str, met: tuple[str, ...] = ()) -> None:
        self.failing, self.met = failing, met
        self.meeting = threading.Barrier(max(1, len(met)), timeout=30)
        self.log: list[tuple[str, str]] = []  # what was begun and taken, in turn

    def job(self, task: Task) -> Callable[[], Path]:
        (name,) = named([task])
        self.log.append(("begun", name))

        def work() -> Path:
            if name in self.met:
                self.meeting.wait()
            if name in self.failing:
                raise BuildError(f"{name} does not go\nthe end of its log")
            return Path(name)

        return work

    def take(self, task: Task, made: Path) -> None:
        assert [made.name] == named([task])
        self.log.append(("taken", made.name))

    @property
    def begun(self) -> list[str]:
        return [name for what, name in self.log if what == "begun"]

    @property
    def taken(self) -> list[str]:
        return [name for what, name in self.log if what == "taken"]

    def run(self, todo: list[Task], at_once: int = 1) -> None:
        with ThreadPoolExecutor(at_once) as pool:
            tasks.run(todo, pool, at_once, self.job, self.take)


def test_a_build_waits_for_what_it_is_made_of_and_a_test_for_all_that_it_installs() -> None:
    after = {name: set(task.after) for name, task in zip(named(work()), work(), strict=True)}
    assert after == {
        "build library": set(),
        "test library": {"library"},
        "build data": set(),
        "test data": {"data"},
        "build left": {"library"},
        "test left": {"left", "library"},
        "build right": {"library"},
        "test right": {"right", "data"},
        "build meta": set(),
        "test meta": {"meta", "left", "right", "library", "data"},
    }


def test_what_is_there_and_unchanged_is_no_task() -> None:
    steps = plan.steps(PACKAGES, "tools", {}, {}, {})
    state = {one.package.place: plan.Finished(one.built, one.tested, "sum") for one in steps}
    there = dict.fromkeys(state, "sum")
    assert tasks.of(plan.steps(PACKAGES, "tools", {}, state, there), PACKAGES) == []
    state["linux-64/left-1.0-0.conda"] = replace(state["linux-64/left-1.0-0.conda"], tested="")
    assert named(tasks.of(plan.steps(PACKAGES, "tools", {}, state, there), PACKAGES)) == ["test left"]


def test_what_lacks_a_framework_is_no_task_and_a_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    packages = (package("compiled", ("torch",)), package("meta", (), ("compiled",)))
    found = tasks.of(plan.steps(packages, "tools", {}, {}, {}, {"torch"}), packages)
    assert named(found) == ["build meta"]
    assert capsys.readouterr().err.splitlines() == [
        "bundle: compiled-1.0-0.conda is not built, for lack of torch (see FRAMEWORKS)",
        "bundle: meta-1.0-0.conda is built, but not tested, for lack of compiled (see FRAMEWORKS)",
    ]


def test_everything_is_done_once_in_an_order_that_keeps_to_what_waits(capsys: pytest.CaptureFixture[str]) -> None:
    for at_once in (1, 2, 4):
        bench = Bench()
        bench.run(work(), at_once)
        assert sorted(bench.taken) == sorted(named(work()))
        places = {event: place for place, event in enumerate(bench.log)}
        for task, (name,) in ((one, named([one])) for one in work()):
            for needed in task.after - ({task.step.package.name} if not task.test else set()):
                assert places["taken", f"build {needed}"] < places["begun", name]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 * (len(work()) + 1)
    assert lines[0].startswith("bundle: channel: ")
    assert lines[0].endswith("(it is not in the channel)")


def test_what_others_wait_for_comes_before_tests() -> None:
    bench = Bench()
    bench.run(work())
    assert [name.partition(" ")[0] for name in bench.begun] == ["build"] * 5 + ["test"] * 5


def test_as_many_go_side_by_side_as_are_asked_for() -> None:
    Bench(met=("build library", "build data")).run(work(), 2)  # each waits until the other goes, too


def test_after_a_failure_nothing_is_begun(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench("build library")
    with pytest.raises(BuildError, match=r"^build library does not go\nthe end of its log$"):
        bench.run(work())
    assert bench.begun == ["build data", "build library"]
    assert "channel: done" not in capsys.readouterr().err


def test_what_goes_while_another_fails_is_kept() -> None:
    bench = Bench("build data", met=("build library", "build data"))
    with pytest.raises(BuildError, match="build data does not go"):
        bench.run(work(), 2)
    assert bench.taken[:1] == ["build library"]


def test_of_two_failures_the_first_in_their_order_is_raised_and_the_other_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = ("build library", "build data")
    with pytest.raises(BuildError, match="build data does not go"):
        Bench(*both, met=both).run(work(), 2)
    assert capsys.readouterr().err == "bundle: library-1.0-0.conda fails, too: build library does not go\n"


class Dying(ThreadPoolExecutor):
    """A pool that takes so many jobs, and then one of its processes is dead."""

    def __init__(self, takes: int) -> None:
        super().__init__(2)
        self.takes = takes

    def submit(self, *arguments: object) -> Future[Path]:  # type: ignore[override]
        self.takes -= 1
        if self.takes < 0:
            raise BrokenExecutor("terminated abruptly")
        return super().submit(*arguments)  # type: ignore[arg-type]


def dies() -> Path:
    raise BrokenExecutor("terminated abruptly")


def test_of_a_process_that_dies_all_are_named_that_it_may_have_worked_on() -> None:
    pattern = r"a process died that worked on data-1\.0-0\.conda or library-1\.0-0\.conda, as"
    with ThreadPoolExecutor(2) as pool, pytest.raises(BuildError, match=pattern):
        tasks.run(work(), pool, 2, lambda task: dies, lambda *_: pytest.fail("taken"))


def test_what_goes_ends_when_the_pool_takes_no_more() -> None:
    bench = Bench()
    with Dying(1) as pool, pytest.raises(BuildError, match="a process died that worked on none of them"):
        tasks.run(work(), pool, 2, bench.job, bench.take)
    assert bench.taken == ["build data"]
    with Dying(0) as pool, pytest.raises(BuildError, match="run this again"):
        tasks.run(work(), pool, 2, bench.job, bench.take)
