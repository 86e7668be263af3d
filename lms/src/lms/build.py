"""Compile LMS's C++ for the framework that is installed.

For PyTorch: the page pool, from which a CPU's tensors come, so that freed memory is reused and not returned to the
system; and the saved-tensor hooks, which do LMS's own work for a saved tensor if nothing has to move. LMS works without
them, slower. For TensorFlow: the operations that swap and that order a graph, without which LMS does not train there.

Needs a C++20 compiler (CXX, g++ or c++) and, for the hooks, Python's headers. Does nothing for a library that is there.
"""

# A wheel cannot carry these libraries, because the frameworks' C++ interfaces change from version to version. Each one
# lies beside its sources. Its name holds the framework's version, the processor's kind (and Python's version if it is a
# Python module), and a checksum of the sources and the compiler's flags. So none is ever loaded with another version,
# on another processor or after an update.

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from lms.errors import LMSError

NATIVE = Path(__file__).with_name("native")
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")


@dataclass(frozen=True)
class Library:
    """A library and its parts."""

    name: str
    title: str
    sources: tuple[str, ...]  # in NATIVE
    links: tuple[str, ...] = ()  # PyTorch's libraries
    is_module: bool = False  # a Python module, which needs Python's headers
    framework: str = "torch"


T = TypeVar("T")

POOL = Library(
    "page_pool",
    "page pool",
    (
        "page_pool.h",
        "page_pool.cc",
        "piece.h",
        "piece.cc",
        "pager.h",
        "pager.cc",
        "faults.h",
        "faults.cc",
        "torch_allocator.cc",
        "loaded.cc",
    ),
    ("c10", "torch_cpu"),
)
HOOKS = Library(
    "native_hooks",
    "saved-tensor hooks",
    ("led_pass.h", "saved_tensor_hooks.cc"),
    ("c10", "torch_cpu", "torch_python"),
    is_module=True,
)
OPERATIONS = Library("tensorflow_swap", "operations", ("tensorflow_swap.cc",), framework="tensorflow")


def library_path(version: str, library: Library = POOL) -> Path:
    """The path of the library for that version of its framework, once it is built."""
    parts = [" ".join(_FLAGS).encode(), *((NATIVE / source).read_bytes() for source in library.sources)]
    checksum = hashlib.sha256(b"".join(parts)).hexdigest()
    return NATIVE / f"{_stem(version, library)}{checksum[:8]}.so"


def _stem(version: str, library: Library) -> str:
    machine = sysconfig.get_config_var("SOABI") if library.is_module else platform.machine()
    return f"{library.name}-{library.framework}{version}-{machine}-"


def built(version: str, library: Library, load: Callable[[str], T]) -> T | None:
    """What `load` makes of the library's path; None, with a warning if it was built, if it cannot be loaded."""
    path = library_path(version, library)
    if not path.exists():
        return None
    try:
        return load(str(path))
    except (ImportError, OSError) as error:
        warnings.warn(
            f"the {library.title} in C++ cannot be loaded ({error}): remove {path.name} and compile it again with "
            f"`python -m lms.build {library.framework}`",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def compiler() -> list[str]:
    """The C++ compiler: $CXX, or g++, or c++. Raises LMSError when there is none."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        raise LMSError("no C++ compiler: looked for g++ and c++; install one (Debian, Ubuntu: g++), or name it in CXX")
    return [found]


def build(library: Library = POOL) -> Path:
    """Compile the library for the framework that this Python imports, unless it is there, and return its path.

    Raises LMSError when that, a compiler or headers are missing, the folder is not writable, or compiling fails.
    """
    try:
        framework = import_module(library.framework)
    except ImportError as error:
        raise LMSError(
            f"{library.framework} cannot be imported, to compile the {library.title} for it: {error}"
        ) from None
    target = library_path(framework.__version__, library)
    if target.exists():
        return target
    flags, links = _torch_flags(framework, library) if library.framework == "torch" else _tensorflow_flags(framework)
    sources = [str(NATIVE / source) for source in library.sources if source.endswith(".cc")]
    if not os.access(NATIVE, os.W_OK):
        raise LMSError(f"{NATIVE} is not writable: run this as the owner of the environment that LMS is installed in")
    with tempfile.TemporaryDirectory(dir=NATIVE, prefix=".build-") as folder:
        made = Path(folder) / target.name
        command = [*compiler(), *_FLAGS, *flags, *sources, *links, "-o", str(made)]
        try:
            run = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise LMSError(f"{command[0]!r} does not run: {error.strerror}; name a C++ compiler in CXX") from None
        if run.returncode:
            raise LMSError(f"{shlex.join(command)} failed:\n{run.stderr.strip()}")
        made.replace(target)
    for old in NATIVE.glob(f"{_stem(framework.__version__, library)}*.so"):
        # Another build may be done meanwhile: what it made is not old.
        if old != target:
            old.unlink(missing_ok=True)
    return target


def _torch_flags(torch: ModuleType, library: Library) -> tuple[list[str], list[str]]:
    """The compiler's flags, and the linker's. Raises LMSError if Python's headers are needed and missing."""
    home = Path(torch.__file__ or "").parent
    flags, folders = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"], [home / "include"]
    if library.is_module:
        headers = Path(sysconfig.get_path("include"))
        if not (headers / "Python.h").is_file():
            raise LMSError(f"{headers} has no Python.h: install Python's headers (Debian, Ubuntu: python3-dev)")
        flags.append("-fvisibility=hidden")
        folders += [home / "include" / "torch" / "csrc" / "api" / "include", headers]
    flags += [f"-isystem{folder}" for folder in folders]
    return flags, ["-L", str(home / "lib"), *(f"-l{name}" for name in library.links)]


def _tensorflow_flags(tensorflow: ModuleType) -> tuple[list[str], list[str]]:
    """The compiler's flags, and the linker's."""
    given = [flag for flag in tensorflow.sysconfig.get_compile_flags() if not flag.startswith("--std")]
    flags = [f"-isystem{flag[2:]}" if flag.startswith("-I") else flag for flag in given]
    return flags, tensorflow.sysconfig.get_link_flags()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lms.build", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("framework", choices=["torch", "tensorflow"], help="the framework to compile for")
    framework = parser.parse_args(arguments).framework
    for library in (POOL, HOOKS) if framework == "torch" else (OPERATIONS,):
        try:
            print(f"lms.build: {build(library).name} is ready")
        except LMSError as error:
            if library is not HOOKS:
                print(f"lms.build: error: {error}", file=sys.stderr)
                return 1
            what = "no saved-tensor hooks in C++, so Python does their work"
            print(f"lms.build: warning: {what}: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
