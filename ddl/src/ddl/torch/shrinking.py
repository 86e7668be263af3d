"""`dist.shrink_group` for process groups in Python.

PyTorch 2.13 asks a group's backend for a smaller one, and wraps it in a new process group as if it were written in C++.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ddl.torch.process_group import ProcessGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup as AnyGroup


def install() -> None:
    """Have PyTorch take a group of ddl that `ProcessGroup.shrink` returns as it is. A second call does nothing."""
    c10d = import_module("torch.distributed.distributed_c10d")
    original = getattr(c10d, "_create_shrunk_process_group", None)
    if original is None or getattr(original, "is_of_ddl", False):
        return

    def create(made: object, ranks: list[int], metadata: dict[str, str], is_default: bool) -> AnyGroup:
        if not isinstance(made, ProcessGroup):
            return original(made, ranks, metadata, is_default)  # type: ignore[no-any-return]
        made._set_group_name(metadata["new_group_name"])
        made._set_group_desc("default:shrunken" if is_default else f"{metadata['original_group_name']}:shrunk")
        return made

    create.is_of_ddl = True  # type: ignore[attr-defined]
    c10d._create_shrunk_process_group = create  # type: ignore[attr-defined]
