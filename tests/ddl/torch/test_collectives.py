"""Each collective of torch.distributed beside gloo's, on several ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def test_every_collective_gives_what_gloo_gives(ranks: Callable[..., object]) -> None:
    done = ranks(4, "torch_collectives.py", timeout=110)
    assert done.returncode == 0, done.stdout
    for rank in range(4):
        assert f"rank {rank}: " in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_so_do_other_numbers_of_ranks(ranks: Callable[..., object], size: int) -> None:
    parts = ["reductions", "coalesced", "scatters", "gathers", "exchanges"]
    parts += ["messages", "overlap", "refused"] if size > 1 else []
    done = ranks(size, "torch_collectives.py", *parts, timeout=110)
    assert done.returncode == 0, done.stdout
