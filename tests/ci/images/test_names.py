import pytest

from bundle.errors import BundleError
from images.names import Package, describe

PYTHON = Package("python", "3.11.7", "0_cpython")
LMS = Package("bascule-lms", "0.1.0", "pyh0_0")


@pytest.mark.parametrize(
    ("more", "tag"),
    [
        ((), "0.1.0-cpu-py311"),
        ((Package("pytorch", "2.13.0", "cpu_py311_0"),), "0.1.0-cpu-py311"),
        ((Package("pytorch", "2.13.0", "cuda129_py311_0"),), "0.1.0-cuda129-py311"),
        (
            (Package("pytorch", "2.13.0", "cuda129_py311_0"), Package("cuda-version", "12.9", "h1_0")),
            "0.1.0-cuda12.9-py311",
        ),
        ((Package("tensorflow", "2.21.0", "cuda128py311h0_0"),), "0.1.0-cuda128-py311"),
    ],
)
def test_a_tag_says_version_accelerator_and_python(more: tuple[Package, ...], tag: str) -> None:
    described = describe("pytorch", (PYTHON, LMS, *more), ())
    assert described.reference == f"localhost/bascule-pytorch:{tag}"


def test_what_comes_by_the_pip_step_may_not_be_passed_on_and_is_named() -> None:
    assert describe("base", (PYTHON, LMS), ()).redistribution == "as each package's licence allows"
    described = describe("snapml", (PYTHON, LMS), ("snapml ==1.17.2",))
    assert described.redistribution.startswith("forbidden: snapml ")


def test_an_environment_without_our_own_package_has_no_name() -> None:
    with pytest.raises(BundleError, match=r"'mine' has no bascule-lms, .*: add it to envs/mine\.yaml"):
        describe("mine", (PYTHON,), ())
