"""`python -m ddl.build tensorflow`: compile DDL's TensorFlow operations for the TensorFlow that is there.

A wheel cannot carry them: TensorFlow's C++ interface changes from version to version. The library lies beside its
source. Its name holds TensorFlow's version, the processor's kind, and a checksum of the source and the compiler's
flags: it is never loaded with another version, on another processor or after an update.
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

from ddl.errors import LibraryError

SOURCE = Path(__file__).with_name("tensorflow") / "operations.cc"
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")


def library_path(version: str) -> Path:
    """The path of the operations for that version of TensorFlow, once they are built."""
    checksum = hashlib.sha256(" ".join(_FLAGS).encode() + SOURCE.read_bytes()).hexdigest()
    return SOURCE.with_name(f"{_stem(version)}{checksum[:8]}.so")


def compiler() -> list[str]:
    """The C++ compiler: $CXX, or g++, or c++. Raises LibraryError if there is none."""
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        raise LibraryError("no C++ compiler: looked for g++ and c++; install one (Debian, Ubuntu: g++), or set CXX")
    return [found]


def build() -> Path:
    """Compile the operations for the TensorFlow that this Python imports, unless they are there; return their path.

    Raises LibraryError if TensorFlow or a compiler is missing, the folder is not writable, or compiling fails.
    """
    try:
        import tensorflow as tf
    except ImportError as error:
        raise LibraryError(f"there is no TensorFlow to compile for: {error}") from None
    target = library_path(tf.__version__)
    if target.exists():
        return target
    flags = tf.sysconfig.get_compile_flags()
    arguments = [
        *_FLAGS,
        *(flag for flag in flags if not flag.startswith(("-I", "--std"))),
        *("-isystem" + flag[2:] for flag in flags if flag.startswith("-I")),  # its headers have warnings of their own
        str(SOURCE),
        *tf.sysconfig.get_link_flags(),
    ]
    _compile(target, arguments)
    for old in SOURCE.parent.glob(f"{_stem(tf.__version__)}*.so"):
        if old != target:
            old.unlink(missing_ok=True)
    return target


def _stem(version: str) -> str:
    return f"operations-tensorflow{version}-{platform.machine()}-"


def _compile(target: Path, arguments: Sequence[str]) -> None:
    folder = target.parent
    if not os.access(folder, os.W_OK):
        raise LibraryError(f"{folder} is not writable: run this as the owner of the environment that DDL is in")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        made = Path(scratch) / target.name
        command = [*compiler(), *arguments, "-o", str(made)]
        try:
            run = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise LibraryError(f"{command[0]!r} does not run: {error.strerror}; name a C++ compiler in CXX") from None
        if run.returncode:
            raise LibraryError(f"{shlex.join(command)} failed:\n{run.stderr.strip()}")
        made.replace(target)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ddl.build",
        description="Compile DDL's TensorFlow operations for the TensorFlow that is installed. Needs a C++17 compiler "
        "(CXX, g++ or c++), and takes some seconds. Without them ddl.tensorflow works through tf.numpy_function, and "
        "is slower. Does nothing if they are there.",
    )
    parser.add_argument("framework", choices=["tensorflow"], help="the framework to compile for")
    parser.parse_args(arguments)
    try:
        print(f"ddl.build: {build().name} is ready")
    except LibraryError as error:
        print(f"ddl.build: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
