from dataclasses import replace

import pytest

from bundle import plan
from bundle.errors import BundleError


def package(name: str, builds_with: tuple[str, ...] = (), runs_with: tuple[str, ...] = (), **more: str) -> plan.Package:
    made = plan.Package(name, "1.0", "h0_0", "linux-64", None, builds_with, runs_with, f"content of {name}")
    return replace(made, **more)


LIBRARY = package("library", builds_with=("cmake",))
BOTH = (package("meta", runs_with=("program",)), package("program", ("library",), ("numpy",)), LIBRARY)
BASE = {"cmake": "c1", "numpy": "n1"}


def built(packages: tuple[plan.Package, ...], state: dict[str, str], tools: str = "t", **base: str) -> list[str]:
    there = [f"linux-64/{one.file}" for one in packages]
    return [one.package.name for one in plan.steps(packages, tools, BASE | base, state, there) if one.reason]


def finished(packages: tuple[plan.Package, ...]) -> dict[str, str]:
    return {f"linux-64/{one.package.file}": one.key for one in plan.steps(packages, "t", BASE, {}, [])}


def test_a_package_comes_after_what_it_is_built_and_tested_with() -> None:
    assert [one.name for one in plan.order(BOTH)] == ["library", "program", "meta"]


def test_packages_that_need_each_other_are_named() -> None:
    circle = (package("a", ("b",)), package("b", (), ("a",)), package("c"))
    with pytest.raises(BundleError, match="in a circle: a, b"):
        plan.order(circle)


def test_at_first_all_are_built_because_none_is_there() -> None:
    steps = plan.steps(BOTH, "t", BASE, {}, [])
    assert [one.reason for one in steps] == ["it is not in the channel"] * 3


def test_nothing_is_built_again_whose_inputs_did_not_change() -> None:
    assert built(BOTH, finished(BOTH)) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [("library", ["library", "program", "meta"]), ("program", ["program", "meta"]), ("meta", ["meta"])],
)
def test_a_change_builds_what_is_made_of_it_and_nothing_else(changed: str, expected: list[str]) -> None:
    now = tuple(replace(one, content="new") if one.name == changed else one for one in BOTH)
    assert built(now, finished(BOTH)) == expected


def test_another_package_below_builds_what_uses_it() -> None:
    assert built(BOTH, finished(BOTH), numpy="n2") == ["program", "meta"]
    assert built(BOTH, finished(BOTH), unused="x") == []


def test_other_tools_build_everything() -> None:
    assert built(BOTH, finished(BOTH), tools="newer") == ["library", "program", "meta"]


def test_a_file_that_is_gone_is_built_again() -> None:
    state = finished(BOTH)
    there = [path for path in state if "program" not in path]
    assert [one.package.name for one in plan.steps(BOTH, "t", BASE, state, there) if one.reason] == ["program"]


def test_a_change_of_one_variant_builds_what_is_made_of_any() -> None:
    packages = (LIBRARY, replace(LIBRARY, build="h1_0"), package("program", ("library",)))
    now = (LIBRARY, replace(LIBRARY, build="h1_0", content="new"), packages[2])
    state = finished(packages)
    again = [one.package.file for one in plan.steps(now, "t", BASE, state, state) if one.reason]
    assert again == ["library-1.0-h1_0.conda", "program-1.0-h0_0.conda"]


FRAMEWORK = (
    package("compiled", ("torch",), ("torch",)),
    package("meta-torch", (), ("compiled",)),
    package("all", (), ("meta-torch", "library")),
    LIBRARY,
)


@pytest.mark.parametrize(
    ("name", "unbuilt", "untested"),
    [("compiled", ["torch"], ["torch"]), ("meta-torch", [], ["torch"]), ("all", [], ["torch"]), ("library", [], [])],
)
def test_what_a_base_was_made_without_is_lacking_through_our_own_packages_too(
    name: str, unbuilt: list[str], untested: list[str]
) -> None:
    (one,) = (one for one in FRAMEWORK if one.name == name)
    assert plan.lacking(one, FRAMEWORK, {"torch", "tensorflow"}) == (unbuilt, untested)
    assert plan.lacking(one, FRAMEWORK, {"tensorflow"}) == ([], [])
    assert plan.lacking(one, FRAMEWORK, set()) == ([], [])
