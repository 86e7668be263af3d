"""libddl's core on another processor: compiled for aarch64, and what depends on the processor run under emulation."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# Arithmetic in every type, rounding modes and denormals, and all collectives on up to 8 ranks.
TESTS = ("test_types", "the bits do not depend", "the other collectives")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"no {COMPILER} and {EMULATOR}: run ci/install_tools, or apt-get install g++-aarch64-linux-gnu qemu-user",
)
def test_numbers_are_the_same_there(
    tmp_path: Path, native: Callable[..., Path], command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    native(
        *(tmp_path, "ddl_tests", "-DDDL_MPI=OFF", f"-DCMAKE_CXX_COMPILER={COMPILER}", "-DCMAKE_SYSTEM_NAME=Linux"),
        *("-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_EXE_LINKER_FLAGS=-static"),  # it needs no libraries of that kind
    )
    for test in TESTS:
        done = command([EMULATOR, tmp_path / "ddl_tests", test], timeout=200)
        assert done.returncode == 0, done.stdout
        assert "\n0 tests" not in done.stdout
