"""The backend in C++ (`ddl/native`), where it was compiled for the PyTorch and the libddl that are there.

`python -m ddl.build torch` compiles it. Without it, process groups are those of `ddl.torch.process_group`, which do the
same some microseconds later. `DDL_TORCH_BACKEND` says which: `auto` (the default), `python`, or `native`, which raises
what is wrong.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from ddl import build, job, library
from ddl.errors import OF_CODE, ArgumentError, DDLError, UnsupportedError
from ddl.torch.tensors import OPERATIONS, TYPES_OF_TORCH

if TYPE_CHECKING:
    from torch.distributed import Backend

    from ddl.torch.process_group import ProcessGroup

VARIABLE = "DDL_TORCH_BACKEND"
_ALLOWED = ("auto", "python", "native")
_COMPILE = "compile it with `python -m ddl.build torch`"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """Which of the two, and why."""

    native: ModuleType | None  # the compiled module; None: Python alone
    reason: str


def choose(environment: Mapping[str, str]) -> Choice:
    """The backend to use. Raises ArgumentError and UnsupportedError: what the environment asks for cannot be."""
    asked = environment.get(VARIABLE) or "auto"
    if asked not in _ALLOWED:
        raise ArgumentError(f"{VARIABLE} is {asked!r}: allowed are {', '.join(_ALLOWED)}")
    if asked == "python":
        return Choice(None, f"{VARIABLE} asks for it")
    found = find()
    if asked == "native" and found.native is None:
        raise UnsupportedError(f"{VARIABLE} asks for the backend in C++, but {found.reason}")
    return found


@cache
def find() -> Choice:
    """The compiled module, where it fits what is here, with the reason. Raises LibraryError: there is no libddl."""
    loaded = library.load()  # its functions are what the module calls
    try:
        path = build.library_path(torch)
    except (DDLError, OSError) as error:
        return Choice(None, f"what it is compiled from is not there: {error}")
    if not path.exists():
        others = [old.name for old in sorted(path.parent.glob("backend-*.so"))]
        stale = f" ({', '.join(others)} is for another PyTorch, or from other sources)" if others else ""
        return Choice(None, f"none was compiled for PyTorch {torch.__version__}{stale}: {_COMPILE}")
    try:
        loader = ExtensionFileLoader(f"{__package__}._backend", str(path))
        spec = spec_from_loader(loader.name, loader)
        assert spec is not None
        module = module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        return Choice(None, f"{path.name} cannot be loaded ({error}): remove it, and {_COMPILE}")
    number = loaded.ddl_version()
    version = (number // 10000, number // 100 % 100)
    if version != module.DDL_VERSION:
        return Choice(None, f"{path.name} is for libddl {module.DDL_VERSION}, and not for {version}: {_COMPILE}")
    module.translate(OF_CODE)
    atexit.register(_end_threads, module)
    return Choice(module, f"{path.name} is for this PyTorch and this libddl")


def _end_threads(module: ModuleType) -> None:
    """Nothing may touch futures while the interpreter goes down."""
    job.finalize()  # ends what is in flight
    module.end_threads()


def wrapped(group: ProcessGroup) -> ProcessGroup | Backend:
    """The process group itself, or a backend in C++ over it. Raises as `choose` does."""
    choice = choose(os.environ)
    _log.info(
        "process group %r: the backend in %s: %s", group.group_name, "C++" if choice.native else "Python", choice.reason
    )
    if choice.native is None:
        return group
    comm = group.communicator
    return choice.native.Backend(  # type: ignore[no-any-return]
        group, comm.rank, comm.size, group.group_name, comm.handle, TYPES_OF_TORCH, OPERATIONS
    )
