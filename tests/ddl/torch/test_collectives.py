"""Each collective of torch.distributed beside gloo's, on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddl import build

PROGRAM = Path(__file__).parents[1] / "programs" / "torch_collectives.py"


def test_every_collective_gives_what_gloo_gives(either: Callable[..., object]) -> None:
    done = either(4, "torch_collectives.py", timeout=110)
    assert done.returncode == 0, done.stdout
    for rank in range(4):
        assert f"rank {rank}: " in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_so_do_other_numbers_of_ranks(either: Callable[..., object], size: int) -> None:
    parts = ["reductions", "coalesced", "scatters", "gathers", "exchanges"]
    parts += ["messages", "overlap", "refused"] if size > 1 else []
    done = either(size, "torch_collectives.py", *parts, timeout=110)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_ranks_with_the_one_backend_and_with_the_other_understand_each_other(
    ranks: Callable[..., object], tmp_path: Path
) -> None:
    if not build.library_path(torch).exists():
        pytest.skip("the backend in C++ was not compiled: `python -m ddl.build torch` says what is missing")
    script = tmp_path / "mixed.py"
    script.write_text(
        "import os, runpy\n"
        "backends = ('python', 'native')\n"
        "os.environ['DDL_TORCH_BACKEND'] = backends[int(os.environ['OMPI_COMM_WORLD_RANK']) % 2]\n"
        f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n"
    )
    done = ranks(4, script, timeout=110)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" checks\n") == 4
