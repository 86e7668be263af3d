"""Registers the backend "ddl" with torch.distributed, and makes its process groups when they are asked for.

`import torch` calls `register`, through `bascule_ddl_torch`: it must be quick, and load nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Backend, ProcessGroup

NAME = "ddl"
DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Make "ddl" known to torch.distributed. Raises whatever is other than expected in this PyTorch."""
    import torch.distributed as dist

    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    from ddl.torch.rendezvous import install

    install()
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=DEVICES)


def create(options: object, backend_options: object) -> ProcessGroup | Backend:
    """What torch.distributed calls to make a group; `options` is its DistributedBackendOptions. Raises DDLError."""
    from ddl.torch import groups

    return groups.create(options)
