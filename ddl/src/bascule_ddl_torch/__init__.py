"""What `import torch` calls (entry point group torch.backends) to get to know the backend "ddl" of torch.distributed.

It is no part of the package `ddl`, because PyTorch loads it in every program of an environment: in one that has a
module `ddl` of its own, too, `import torch` must work.
"""

from __future__ import annotations

import sys


def register() -> None:
    """Have `ddl.torch.backend` register it; where that cannot be, what is wrong is raised when a group is made."""
    try:
        from ddl.torch.backend import register as its_own

        its_own()
    except Exception as error:
        _refuse(error)


def _refuse(failure: Exception) -> None:
    def create(options: object, backend_options: object) -> None:
        file = getattr(sys.modules.get("ddl"), "__file__", None)
        found = f"; `ddl` is {file} here" if file else ""
        raise RuntimeError(f"the backend ddl could not be loaded at `import torch`: {failure}{found}") from failure

    try:
        import torch.distributed as dist

        if dist.is_available():
            dist.Backend.register_backend("ddl", create, extended_api=True, devices=["cpu", "cuda"])
    except Exception:
        return  # then "ddl" is a name that torch.distributed does not know, and says so
