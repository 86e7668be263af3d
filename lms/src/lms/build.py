"""`python -m lms.build torch` (or `tensorflow`): compile what LMS has in C++ for the framework that is there.

For PyTorch that is the page pool, for TensorFlow the operations of the file tier. A wheel cannot carry them, because
the interfaces of PyTorch's allocators and of TensorFlow's operations change from version to version. The result lies
beside its sources, under a name that holds the framework's version, the processor's kind and a checksum of the sources
and the compiler's flags, so that none is ever loaded with another version, on another processor or after an update.
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
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lms.errors import LMSError

NATIVE = Path(__file__).with_name("native")
SOURCES = tuple(NATIVE / name for name in ("page_pool.h", "page_pool.cc", "torch_allocator.cc"))
OPERATIONS = NATIVE / "tensorflow_swap.cc"
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")


def library_path(torch_version: str) -> Path:
    """The path of the library for that PyTorch, once it is built."""
    return _library_path(_stem(torch_version), SOURCES)


def operations_path(tensorflow_version: str) -> Path:
    """The path of the operations for that TensorFlow, once they are built."""
    return _library_path(_operations_stem(tensorflow_version), [OPERATIONS])


def _library_path(stem: str, sources: Sequence[Path]) -> Path:
    parts = [" ".join(_FLAGS).encode(), *(source.read_bytes() for source in sources)]
    checksum = hashlib.sha256(b"".join(parts)).hexdigest()
    return NATIVE / f"{stem}{checksum[:8]}.so"


def _stem(torch_version: str) -> str:
    return f"page_pool-torch{torch_version}-{platform.machine()}-"


def _operations_stem(tensorflow_version: str) -> str:
    return f"tensorflow_swap-tensorflow{tensorflow_version}-{platform.machine()}-"


def compiler() -> list[str]:
    """The C++ compiler: $CXX, or g++, or c++. Raises LMSError when there is none."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        raise LMSError("no C++ compiler: looked for g++ and c++; install one (Debian, Ubuntu: g++), or name it in CXX")
    return [found]


def build() -> Path:
    """Compile the library for the PyTorch that this Python imports, unless it is there, and return its path.

    Raises LMSError when PyTorch or a compiler is missing, the folder is not writable, or compiling fails.
    """
    try:
        import torch
    except ImportError as error:
        raise LMSError(f"the page pool is compiled against PyTorch, which cannot be imported: {error}") from None
    home = Path(torch.__file__).parent
    arguments = [
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *("-isystem", str(home / "include")),
        *(str(source) for source in SOURCES if source.suffix == ".cc"),
        *("-L", str(home / "lib"), "-lc10"),
    ]
    return _compile(library_path(torch.__version__), _stem(torch.__version__), arguments)


def build_operations() -> Path:
    """Compile the operations for the TensorFlow that this Python imports, unless they are there; where they lie.

    Raises LMSError as `build`.
    """
    try:
        import tensorflow
    except ImportError as error:
        raise LMSError(f"the operations are compiled against TensorFlow, which cannot be imported: {error}") from None
    flags = tensorflow.sysconfig.get_compile_flags()
    arguments = [
        *_FLAGS,
        *(flag for flag in flags if not flag.startswith(("-I", "--std"))),
        *("-isystem" + flag[2:] for flag in flags if flag.startswith("-I")),
        str(OPERATIONS),
        *tensorflow.sysconfig.get_link_flags(),
    ]
    version = tensorflow.__version__
    return _compile(operations_path(version), _operations_stem(version), arguments)


def _compile(target: Path, stem: str, arguments: Sequence[str]) -> Path:
    """Compile `target` unless it is there, and remove those of the same stem that it replaces."""
    if target.exists():
        return target
    if not os.access(NATIVE, os.W_OK):
        raise LMSError(f"{NATIVE} is not writable: run this as the owner of the environment that LMS is installed in")
    with tempfile.TemporaryDirectory(dir=NATIVE, prefix=".build-") as folder:
        made = Path(folder) / target.name
        command = [*compiler(), *arguments, "-o", str(made)]
        try:
            run = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise LMSError(f"{command[0]!r} does not run: {error.strerror}; name a C++ compiler in CXX") from None
        if run.returncode:
            raise LMSError(f"{shlex.join(command)} failed:\n{run.stderr.strip()}")
        made.replace(target)
    for old in NATIVE.glob(f"{stem}*.so"):
        # Another build may be done meanwhile: what it made is not old.
        if old != target:
            old.unlink(missing_ok=True)
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lms.build",
        description="Compile what LMS has in C++ for a framework. For torch: the page pool, from which a CPU's tensors "
        "come, so that freed memory is reused and not returned to the system; LMS works without it, slower on a CPU "
        "and the same on a GPU. For tensorflow: the operations that swap to a file, without which LMS does not train "
        "on a CPU. Needs a C++20 compiler (CXX, g++ or c++); does nothing when the library is there.",
    )
    parser.add_argument("framework", choices=["torch", "tensorflow"], help="the framework to compile for")
    framework = parser.parse_args(arguments).framework
    try:
        path = build() if framework == "torch" else build_operations()
    except LMSError as error:
        print(f"lms.build: error: {error}", file=sys.stderr)
        return 1
    print(f"lms.build: {path.name} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
