"""Builds libddl's C++ tests under the sanitizers, and (slow) over the core that `make setup` compiled; runs them."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILDS = ROOT / "out" / "ddl-build"  # kept: the next run compiles what has changed
SANITIZERS = {"address-undefined": "address,undefined", "thread": "thread"}
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}
PARTS = 3  # of the tests, that run at once


def run(*command: str, timeout: int, **environment: str) -> str:
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, errors="replace", timeout=timeout
    )
    if done.returncode != 0:
        said = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("ok ")]
        raise AssertionError("\n".join([f"{' '.join(command)}: exit status {done.returncode}", *said]))
    return done.stdout


def without_address_randomisation(command: list[str]) -> list[str]:
    # ThreadSanitizer of g++ 12 does not start where the kernel randomises more bits than it expects.
    setarch = shutil.which("setarch")
    if setarch and subprocess.run([setarch, "-R", "true"], capture_output=True).returncode == 0:
        return [setarch, "-R", *command]
    return command


@pytest.fixture
def built(native: Callable[..., Path], compiled: Callable[[str], Path]) -> Callable[[str], Path]:
    def build(name: str) -> Path:
        if name == "plain":
            return compiled("ddl_tests") / "ddl_tests"
        folder = BUILDS / name
        return native(folder, "ddl_tests", "-DDDL_MPI=OFF", f"-DDDL_SANITIZE={SANITIZERS[name]}") / "ddl_tests"

    return build


@pytest.mark.timeout(1800)  # the first build under a sanitizer compiles more than a hundred files
@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.slow), *SANITIZERS])
def test_the_native_tests_pass(built: Callable[[str], Path], name: str) -> None:
    command = [str(built(name))]
    if name == "thread":
        command = without_address_randomisation(command)
    # Side by side: most of the time some threads wait for others, or for a timeout.
    parts = [[*command, "--part", f"{part + 1}/{PARTS}"] for part in range(PARTS)]
    with ThreadPoolExecutor(PARTS) as pool:
        runs = [pool.submit(run, *part, timeout=600, **ENVIRONMENT) for part in parts]
    failures = [str(one.exception()) for one in runs if one.exception() is not None]
    assert not failures, "\n".join(failures)
    for one in runs:
        assert "0 failed" in one.result().splitlines()[-1]


def test_what_is_left_out_under_the_thread_sanitizer_starts_no_thread() -> None:
    listed = re.search(r"set\(DDL_TESTS_OF_ONE_THREAD ([^)]*)\)", (ROOT / "ddl/CMakeLists.txt").read_text())
    assert listed
    folders = (ROOT / "tests/ddl/csrc", ROOT / "ddl/csrc", ROOT / "ddl/include")
    unread = [f"test_{name}.cc" for name in listed[1].split()]
    assert len(unread) > 10
    read = set()
    while unread:  # each of them, its headers, theirs, and the sources to these
        name = unread.pop()
        for path in (folder / name for folder in folders):
            if path.exists() and path not in read:
                read.add(path)
                text = path.read_text()
                assert not re.search(r"std::j?thread|std::async|pthread_create", text), path
                unread += (included := re.findall(r'^#include "([\w./]+)"', text, re.MULTILINE))
                unread += [header.removesuffix(".h") + ".cc" for header in included]


@pytest.mark.timeout(900)
def test_a_run_of_no_test_fails(built: Callable[[str], Path]) -> None:
    done = subprocess.run(
        [str(built("address-undefined")), "no test is called this"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "0 tests, 0 failed"


@pytest.mark.timeout(60)
def test_the_header_is_plain_c(tmp_path: Path) -> None:
    source = tmp_path / "uses_ddl.c"
    source.write_text(
        '#include "ddl.h"\n#include "ddl_plan.h"\n'
        "int main(void) { ddl_op op = DDL_SUM; return (int)op + (DDL_WORLD != 0); }\n"
    )
    include = f"-I{ROOT / 'ddl' / 'include'}"
    run("gcc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", include, "-c", str(source), "-o",
        str(tmp_path / "uses_ddl.o"), timeout=30)  # fmt: skip
