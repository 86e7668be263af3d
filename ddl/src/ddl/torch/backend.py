"""Registers the backend "ddl" with torch.distributed, and makes its process groups when they are asked for.

PyTorch calls `register` at the end of `import torch`: it must be quick, load nothing, and never raise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Backend, ProcessGroup

NAME = "ddl"
DEVICES = ["cpu", "cuda"]

_failure: Exception | None = None  # what went wrong in `register`


def register() -> None:
    """Make "ddl" known to torch.distributed. What goes wrong is raised when a group is made."""
    global _failure
    try:
        import torch.distributed as dist

        if not dist.is_available():
            return
        if NAME.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(NAME, create, extended_api=True, devices=DEVICES)
    except Exception as error:
        _failure = error
    try:
        from ddl.torch.rendezvous import install

        install()
    except Exception as error:
        _failure = _failure or error


def create(options: object, backend_options: object) -> ProcessGroup | Backend:
    """What torch.distributed calls to make a group; `options` is its DistributedBackendOptions. Raises DDLError."""
    if _failure is not None:
        raise RuntimeError(f"the backend ddl could not be registered at `import torch`: {_failure}") from _failure
    from ddl.torch import groups

    return groups.create(options)
