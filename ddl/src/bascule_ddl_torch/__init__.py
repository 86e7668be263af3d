"""Registers the backend "ddl" of torch.distributed: `import torch` calls it (entry point group torch.backends).

It is no part of the package `ddl`, because PyTorch loads it in every program of an environment: in one that has a
module `ddl` of its own, too, `import torch` must work.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress


def register() -> None:
    """Register "ddl". Never raises: an error is kept, and raised when a group is made."""
    try:
        from ddl.torch import backend

        backend.register()
    except Exception as error:
        _refuse(error)


def _refuse(failure: Exception) -> None:
    def create(*_: object) -> None:
        file = getattr(sys.modules.get("ddl"), "__file__", None)
        found = f"; `ddl` is {file} here, and must be the package of bascule-ddl" if file else ""
        raise RuntimeError(f"the backend ddl could not be loaded at `import torch`: {failure}{found}") from failure

    # The second form is for a PyTorch whose first one is another. Where that fails, too, "ddl" is an unknown name, and
    # nothing can be raised later; where warnings are errors, this one is none.
    with suppress(Exception):
        import torch.distributed as dist

        try:
            dist.Backend.register_backend("ddl", create, extended_api=True, devices=["cpu", "cuda"])
        except Exception:
            try:
                dist.Backend.register_backend("ddl", create)
            except Exception:
                text = f"torch.distributed does not take the backend ddl: {type(failure).__name__}: {failure}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
