"""`python -m ddl.build torch`: compile the backend in C++ for the PyTorch that is there.

A wheel cannot carry it, because the interface of PyTorch's backends changes from version to version. The result lies
beside its sources, under a name that holds PyTorch's version, Python's and the processor's kind, and a checksum of the
sources, of libddl's interface, of the compiler's flags and of PyTorch's own build, so that none is ever loaded with
another PyTorch or after an update. It is linked with no libddl: it uses the one that this package has loaded.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ddl.errors import DDLError

NATIVE = Path(__file__).with_name("native")
SOURCES = tuple(
    NATIVE / name
    for name in (
        *("reaper.h", "reaper.cc", "errors.h", "errors.cc", "work.h", "work.cc"),
        *("delegated.h", "delegated.cc", "backend.h", "backend.cc", "module.cc"),
    )
)
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")
_LIBRARIES = ("c10", "torch_cpu", "torch_python")


class BuildError(DDLError):
    """The backend cannot be compiled here; the message says what is missing."""


def interface() -> Path:
    """Where ddl.h is: of the repository, or installed beside libddl. Raises BuildError."""
    from ddl import library

    here = Path(__file__).resolve().parent
    looked = [here.parents[1] / "include" / "ddl.h", here / "include" / "ddl.h"]
    looked += [path.parent / "include" / "ddl.h" for path in library.candidates()]
    for path in looked:
        if path.is_file():
            return path
    raise BuildError(f"ddl.h was not found ({', '.join(map(str, looked))}): reinstall {library.DISTRIBUTION}")


def library_path(torch: ModuleType) -> Path:
    """Where the backend for that PyTorch lies, once it is built. Raises BuildError: libddl's interface is missing."""
    parts = [" ".join([*_FLAGS, *_definitions(torch)]), str(torch.version.git_version)]
    contents = [source.read_bytes() for source in (*SOURCES, interface())]
    checksum = hashlib.sha256(b"\0".join([*(part.encode() for part in parts), *contents])).hexdigest()
    return NATIVE / f"{_stem(torch)}{checksum[:8]}.so"


def _stem(torch: ModuleType) -> str:
    return f"backend-torch{torch.__version__}-{sysconfig.get_config_var('SOABI')}-"


def _definitions(torch: ModuleType) -> list[str]:
    flags = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):  # by which pybind11 2 knew who shares its types
        if value := getattr(torch._C, f"_PYBIND11_{name}", None):
            flags.append(f'-DPYBIND11_{name}="{value}"')
    return flags


def compiler() -> list[str]:
    """The C++ compiler: $CXX, or g++, or c++. Raises BuildError when there is none."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        raise BuildError(
            "no C++ compiler: looked for g++ and c++; install one (Debian, Ubuntu: g++), or name it in CXX"
        )
    return [found]


def python_headers() -> Path:
    """The folder of Python.h. Raises BuildError: it is not installed."""
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").is_file():
        raise BuildError(f"{folder} has no Python.h: install Python's headers (Debian, Ubuntu: python3-dev)")
    return folder


def build() -> Path:
    """Compile the backend for the PyTorch that this Python imports, unless it is there; where it lies.

    Raises BuildError when PyTorch, a compiler or headers are missing, the folder is not writable, or compiling fails.
    """
    try:
        import torch
    except ImportError as error:
        raise BuildError(f"the backend is compiled against PyTorch, which cannot be imported: {error}") from None
    target = library_path(torch)
    if target.exists():
        return target
    if not os.access(NATIVE, os.W_OK):
        raise BuildError(f"{NATIVE} is not writable: run this as the owner of the environment that ddl is installed in")
    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=NATIVE, prefix=".build-") as folder:
        made = Path(folder) / target.name
        # All in one: nearly all of the time goes into PyTorch's headers.
        whole = Path(folder) / "whole.cc"
        whole.write_text("".join(f'#include "{source}"\n' for source in SOURCES if source.suffix == ".cc"))
        command = [
            *compiler(),
            *_FLAGS,
            *_definitions(torch),
            *("-I", str(interface().parent)),
            *("-isystem", str(home / "include")),
            *("-isystem", str(home / "include" / "torch" / "csrc" / "api" / "include")),
            *("-isystem", str(python_headers())),
            *(str(whole), "-o", str(made)),
            *("-L", str(home / "lib"), *(f"-l{name}" for name in _LIBRARIES)),
        ]
        try:
            run = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise BuildError(f"{command[0]!r} does not run: {error.strerror}; name a C++ compiler in CXX") from None
        if run.returncode:
            raise BuildError(f"{shlex.join(command)} failed:\n{run.stderr.strip()}")
        made.replace(target)
    for old in NATIVE.glob("backend-*.so"):
        # Another build may be done meanwhile: what it made is not old.
        if old != target and old.name.startswith(_stem(torch)):
            old.unlink(missing_ok=True)
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ddl.build",
        description="Compile what DDL has in C++ for a framework: PyTorch's backend `ddl`, a fast path of what is "
        "called most. DDL works without it, some microseconds a call slower. Needs a C++20 compiler (CXX, g++ or c++) "
        "and Python's headers; does nothing when it is there.",
    )
    parser.add_argument("framework", choices=["torch"], help="the framework to compile for")
    parser.parse_args(arguments)
    try:
        path = build()
    except DDLError as error:
        print(f"ddl.build: error: {error}", file=sys.stderr)
        return 1
    print(f"ddl.build: {path.name} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
