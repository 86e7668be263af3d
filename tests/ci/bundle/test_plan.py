from dataclasses import replace

import pytest

from bundle import plan
from bundle.errors import BundleError


def package(
    name: str,
    builds_with: tuple[str, ...] = (),
    runs_with: tuple[str, ...] = (),
    tests_with: tuple[str, ...] = (),
) -> plan.Package:
    return plan.Package(name, "1.0", "h0_0", "linux-64", builds_with, runs_with, tests_with, f"content of {name}")


LIBRARY = package("library", builds_with=("cmake",))
BOTH = (package("meta", runs_with=("program",)), package("program", ("library",), ("numpy",)), LIBRARY)
BASE = {"cmake": "c1", "numpy": "n1"}


State = dict[str, plan.Finished]


def finished(packages: tuple[plan.Package, ...]) -> State:
    """As a run leaves it that has built and tested all."""
    steps = plan.steps(packages, "t", BASE, {}, {})
    return {one.package.place: plan.Finished(one.built, one.tested, f"sum of {one.package.name}") for one in steps}


def files(packages: tuple[plan.Package, ...]) -> dict[str, str]:
    return {one.place: f"sum of {one.name}" for one in packages}


def steps(packages: tuple[plan.Package, ...], state: State, tools: str = "t", **base: str) -> list[plan.Step]:
    return plan.steps(packages, tools, BASE | base, state, files(packages))


def built(*arguments: object, **more: str) -> list[str]:
    return [one.package.name for one in steps(*arguments, **more) if one.builds]  # type: ignore[arg-type]


def only_tested(*arguments: object, **more: str) -> list[str]:
    return [one.package.name for one in steps(*arguments, **more) if one.tests and not one.builds]  # type: ignore[arg-type]


def test_a_package_comes_after_what_it_is_built_and_tested_with() -> None:
    assert [one.name for one in plan.order(BOTH)] == ["library", "program", "meta"]


def test_packages_that_need_each_other_are_named() -> None:
    circle = (package("a", ("b",)), package("b", (), ("a",)), package("c"))
    with pytest.raises(BundleError, match="in a circle: a, b"):
        plan.order(circle)


def test_at_first_all_are_built_and_tested_because_none_is_there() -> None:
    steps = plan.steps(BOTH, "t", BASE, {}, {})
    assert [(one.builds, one.tests) for one in steps] == [("it is not in the channel",) * 2] * 3


def test_nothing_is_done_again_whose_inputs_did_not_change() -> None:
    assert [one.reason for one in steps(BOTH, finished(BOTH))] == [None] * 3


@pytest.mark.parametrize(
    ("changed", "builds", "tests"),
    [
        ("library", ["library", "program"], ["meta"]),  # what merely runs with it is tested with it
        ("program", ["program"], ["meta"]),
        ("meta", ["meta"], []),
    ],
)
def test_a_change_builds_what_is_made_of_it_and_tests_what_runs_with_it(
    changed: str, builds: list[str], tests: list[str]
) -> None:
    now = tuple(replace(one, content="new") if one.name == changed else one for one in BOTH)
    assert built(now, finished(BOTH)) == builds
    assert only_tested(now, finished(BOTH)) == tests


def test_another_package_below_has_what_runs_with_it_tested_and_what_is_built_with_it_built() -> None:
    assert built(BOTH, finished(BOTH), numpy="n2") == []
    assert only_tested(BOTH, finished(BOTH), numpy="n2") == ["program", "meta"]
    assert built(BOTH, finished(BOTH), cmake="c2") == ["library", "program"]
    assert [one.reason for one in steps(BOTH, finished(BOTH), unused="x")] == [None] * 3


def test_what_only_the_tests_of_a_package_need_is_nothing_to_those_who_run_with_it() -> None:
    packages = (package("program", (), (), ("numpy",)), package("meta", (), ("program",)))
    assert only_tested(packages, finished(packages), numpy="n2") == ["program"]


def test_other_tools_build_everything() -> None:
    assert built(BOTH, finished(BOTH), tools="newer") == ["library", "program", "meta"]


def test_a_file_that_is_gone_is_built_again() -> None:
    there = {place: one for place, one in files(BOTH).items() if "program" not in place}
    found = plan.steps(BOTH, "t", BASE, finished(BOTH), there)
    assert [one.package.name for one in found if one.reason] == ["program"]


def test_a_file_that_is_damaged_is_built_again_with_that_reason() -> None:
    there = files(BOTH) | {"linux-64/program-1.0-h0_0.conda": "another"}
    found = plan.steps(BOTH, "t", BASE, finished(BOTH), there)
    assert {one.package.name: one.reason for one in found if one.reason} == {"program": "its file is damaged"}


def test_what_was_built_and_never_passed_is_tested() -> None:
    state = finished(BOTH)
    state["linux-64/program-1.0-h0_0.conda"] = replace(state["linux-64/program-1.0-h0_0.conda"], tested="")
    assert built(BOTH, state) == []
    assert only_tested(BOTH, state) == ["program"]


OPENMPI, MPICH = ({"mpi": name, "cxx_compiler_version": "14"} for name in ("openmpi", "mpich"))
VARIANTS = (
    replace(LIBRARY, build="openmpi_0", variant=OPENMPI),
    replace(LIBRARY, build="mpich_0", variant=MPICH),
    replace(package("program", ("library",)), build="openmpi_py311_0", variant={"mpi": "openmpi", "python": "3.11"}),
    replace(package("program", ("library",)), build="mpich_py311_0", variant={"mpi": "mpich", "python": "3.11"}),
    package("backend", ("library",)),  # made of whichever there is
    package("meta", (), ("program",)),
)


def test_a_change_of_one_variant_builds_what_is_made_of_it_and_nothing_of_another() -> None:
    now = tuple(replace(one, content="new") if one.build == "mpich_0" else one for one in VARIANTS)
    again = [(one.package.name, one.package.build) for one in steps(now, finished(VARIANTS)) if one.builds]
    assert again == [("library", "mpich_0"), ("backend", "h0_0"), ("program", "mpich_py311_0")]
    assert only_tested(now, finished(VARIANTS)) == ["meta"]


def test_leaving_one_variant_out_builds_nothing_of_another() -> None:
    left = tuple(one for one in VARIANTS if one.variant != MPICH and one.name != "backend" and "mpich" not in one.build)
    assert built(left, finished(VARIANTS)) == []
    assert only_tested(left, finished(VARIANTS)) == ["meta"]  # which now runs with the other only


FRAMEWORK = (
    package("compiled", ("torch",), ("torch",)),
    package("meta-torch", (), ("compiled",)),
    package("all", (), ("meta-torch", "library")),
    package("planner", (), (), ("torch",)),
    package("meta-base", (), ("planner",)),
    LIBRARY,
)


@pytest.mark.parametrize(
    ("name", "unbuilt", "untested"),
    [
        ("compiled", ["torch"], ["torch"]),
        ("meta-torch", [], ["torch"]),
        ("all", [], ["torch"]),
        ("library", [], []),
        ("planner", [], ["torch"]),  # whose own test needs it
        ("meta-base", [], []),  # and nobody else
    ],
)
def test_what_a_base_was_made_without_is_lacking_through_our_own_packages_too(
    name: str, unbuilt: list[str], untested: list[str]
) -> None:
    (one,) = (one for one in FRAMEWORK if one.name == name)
    assert plan.lacking(one, FRAMEWORK, {"torch", "tensorflow"}) == (unbuilt, untested)
    assert plan.lacking(one, FRAMEWORK, {"tensorflow"}) == ([], [])
    assert plan.lacking(one, FRAMEWORK, set()) == ([], [])


def test_what_cannot_be_tested_is_built_and_tested_as_soon_as_it_can_be() -> None:
    without = plan.steps(FRAMEWORK, "t", BASE, {}, {}, {"torch"})
    assert [one.package.name for one in without if one.builds and one.tests] == ["library", "meta-base"]
    state = {one.package.place: plan.Finished(one.built, one.tested, f"sum of {one.package.name}") for one in without}
    there = files(FRAMEWORK)
    again = plan.steps(FRAMEWORK, "t", BASE, state, there, {"torch"})
    assert [one.reason for one in again] == [None] * len(FRAMEWORK)
    later = plan.steps(FRAMEWORK, "t", BASE, state, there)
    assert [one.package.name for one in later if one.builds] == []
    assert [one.package.name for one in later if one.tests] == ["compiled", "planner", "meta-torch", "all"]
    # And who leaves the framework out again loses nothing.
    full = {one.package.place: plan.Finished(one.built, one.tested, f"sum of {one.package.name}") for one in later}
    assert [one.reason for one in plan.steps(FRAMEWORK, "t", BASE, full, there, {"torch"})] == [None] * len(FRAMEWORK)


def test_what_was_compiled_for_a_framework_stays_where_that_is_left_out_and_its_last_checksum_is_known() -> None:
    first = plan.steps(FRAMEWORK, "t", BASE | {"torch": "t1"}, {}, {})
    state = {one.package.place: plan.Finished(one.built, one.tested, f"sum of {one.package.name}") for one in first}
    there = files(FRAMEWORK)
    for torch, lost in (("t1", []), ("t2", ["compiled"])):
        now = plan.steps(FRAMEWORK, "t", BASE | {"torch": torch}, state, there, {"torch"})
        assert [one.package.name for one in now if one.builds and one.unbuilt] == lost


def test_what_would_have_to_be_tested_with_a_framework_that_is_left_out_is_overdue() -> None:
    def overdue(packages: tuple[plan.Package, ...]) -> list[str]:
        made = plan.steps(packages, "t", BASE, finished(FRAMEWORK), files(FRAMEWORK), {"torch"})
        return [one.package.name for one in made if one.overdue]

    changed = tuple(replace(one, content="new") if one.name == "library" else one for one in FRAMEWORK)
    assert overdue(FRAMEWORK) == []
    assert overdue(changed) == ["all"]


def test_what_runs_with_a_package_that_cannot_be_built_is_not_tested() -> None:
    packages = (package("compiled", ("torch",), ()), package("meta", (), ("compiled",)))
    steps = plan.steps(packages, "t", BASE, {}, {}, {"torch"})
    assert [(one.package.name, one.unbuilt, one.untested) for one in steps] == [
        ("compiled", ("torch",), ()),
        ("meta", (), ("compiled",)),
    ]
