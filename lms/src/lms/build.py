"""`python -m lms.build torch`: compile the page pool and the saved-tensor hooks for the PyTorch that is there.

A wheel cannot carry them, because PyTorch's C++ interfaces change from version to version. Each library lies beside its
sources. Its name holds PyTorch's version, the processor's kind (and Python's version if it is a Python module), and a
checksum of the sources and the compiler's flags. So none is ever loaded with another PyTorch, on another processor or
after an update.
"""

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lms.errors import LMSError

NATIVE = Path(__file__).with_name("native")
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")


@dataclass(frozen=True)
class Library:
    """A library and its parts."""

    name: str
    title: str
    sources: tuple[str, ...]  # in NATIVE
    links: tuple[str, ...]  # PyTorch's libraries
    is_module: bool = False  # a Python module, which needs Python's headers


POOL = Library("page_pool", "page pool", ("page_pool.h", "page_pool.cc", "torch_allocator.cc"), ("c10",))
HOOKS = Library(
    "native_hooks",
    "saved-tensor hooks",
    ("saved_tensor_hooks.cc",),
    ("c10", "torch_cpu", "torch_python"),
    is_module=True,
)


def library_path(torch_version: str, library: Library = POOL) -> Path:
    """The path of the library for that PyTorch, once it is built."""
    parts = [" ".join(_FLAGS).encode(), *((NATIVE / source).read_bytes() for source in library.sources)]
    checksum = hashlib.sha256(b"".join(parts)).hexdigest()
    return NATIVE / f"{_stem(torch_version, library)}{checksum[:8]}.so"


def _stem(torch_version: str, library: Library) -> str:
    machine = sysconfig.get_config_var("SOABI") if library.is_module else platform.machine()
    return f"{library.name}-torch{torch_version}-{machine}-"


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
    """Compile the library for the PyTorch that this Python imports, unless it is there, and return its path.

    Raises LMSError when PyTorch, a compiler or headers are missing, the folder is not writable, or compiling fails.
    """
    try:
        import torch
    except ImportError as error:
        raise LMSError(
            f"the {library.title} needs PyTorch to compile against, which cannot be imported: {error}"
        ) from None
    target = library_path(torch.__version__, library)
    if target.exists():
        return target
    if not os.access(NATIVE, os.W_OK):
        raise LMSError(f"{NATIVE} is not writable: run this as the owner of the environment that LMS is installed in")
    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=NATIVE, prefix=".build-") as folder:
        made = Path(folder) / target.name
        command = [
            *compiler(),
            *_FLAGS,
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
            *("-isystem", str(home / "include")),
            *(_module_flags(home) if library.is_module else ()),
            *(str(NATIVE / source) for source in library.sources if source.endswith(".cc")),
            *("-o", str(made)),
            *("-L", str(home / "lib"), *(f"-l{name}" for name in library.links)),
        ]
        try:
            run = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise LMSError(f"{command[0]!r} does not run: {error.strerror}; name a C++ compiler in CXX") from None
        if run.returncode:
            raise LMSError(f"{shlex.join(command)} failed:\n{run.stderr.strip()}")
        made.replace(target)
    for old in NATIVE.glob(f"{library.name}-*.so"):
        # Another build may be done meanwhile: what it made is not old.
        if old != target and old.name.startswith(_stem(torch.__version__, library)):
            old.unlink(missing_ok=True)
    return target


def _module_flags(home: Path) -> list[str]:
    """The further flags of a Python module. Raises LMSError if Python's headers are missing."""
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise LMSError(f"{headers} has no Python.h: install Python's headers (Debian, Ubuntu: python3-dev)")
    folders = (home / "include" / "torch" / "csrc" / "api" / "include", headers)
    return ["-fvisibility=hidden", *(flag for folder in folders for flag in ("-isystem", str(folder)))]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lms.build",
        description="Compile LMS's C++ for a framework: the page pool, from which a CPU's tensors come, so that freed "
        "memory is reused and not returned to the system; and the saved-tensor hooks, which do LMS's own work for a "
        "saved tensor if nothing has to move. LMS works without them, slower. Needs a C++20 compiler (CXX, g++ or "
        "c++) and, for the hooks, Python's headers. Does nothing for a library that is there.",
    )
    parser.add_argument("framework", choices=["torch"], help="the framework to compile for")
    parser.parse_args(arguments)
    try:
        print(f"lms.build: {build().name} is ready")
    except LMSError as error:
        print(f"lms.build: error: {error}", file=sys.stderr)
        return 1
    try:
        print(f"lms.build: {build(HOOKS).name} is ready")
    except LMSError as error:
        print(f"lms.build: warning: no saved-tensor hooks in C++, so Python does their work: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
