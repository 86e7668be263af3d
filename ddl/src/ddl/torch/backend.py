"""Registers the backend "ddl" with torch.distributed, and makes its process groups when they are asked for.

`import torch` calls `register`, through `bascule_ddl_torch`: it must be quick, and load nothing.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "ddl"
DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Register "ddl" with torch.distributed. Raises any error of a PyTorch whose interface has changed."""
    import torch.distributed as dist

    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    from ddl.torch.rendezvous import asks_mpi, install

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=DEVICES)
    try:
        install()
    except Exception as error:  # ddlrun and torchrun's scripts do without it
        if asks_mpi(os.environ):
            warnings.warn(
                "the backend ddl cannot put its part into this PyTorch's env:// rendezvous, which therefore does not "
                f"know what mpirun knows ({type(error).__name__}: {error}): start with ddlrun, or set RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                RuntimeWarning,
                stacklevel=2,
            )


def create(options: object, backend_options: object) -> ProcessGroup:
    """Make a group: torch.distributed calls this with its DistributedBackendOptions. Raises DDLError."""
    from ddl.torch import groups

    return groups.create(options)
