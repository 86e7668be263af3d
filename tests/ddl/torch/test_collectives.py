"""Each collective of torch.distributed beside gloo's, on several ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def test_every_collective_gives_what_gloo_gives(either: Callable[..., object]) -> None:
    done = either(4, "torch_collectives.py", timeout=110)
    assert done.returncode == 0, done.stdout
    for rank in range(4):
        assert f"rank {rank}: " in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_so_do_other_numbers_of_ranks(either: Callable[..., object], size: int) -> None:
    parts = ["reductions", "scatters", "gathers", "exchanges"]
    parts += ["messages", "overlap", "refused"] if size > 1 else []
    done = either(size, "torch_collectives.py", *parts, timeout=110)
    assert done.returncode == 0, done.stdout
