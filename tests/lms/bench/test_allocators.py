"""The allocators that plain is measured over: what is said if one is missing, and that it is really the one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import allocators
import pytest

pytest.importorskip("torch")

ENTER = "import allocators, torch; allocators.enter({!r}); torch.ones(1 << 20)"


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    folder = Path(allocators.__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parent / "src")])
    environ = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "MALLOC_CONF")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("kind", ["pool", "jemalloc"])
def test_a_process_gets_the_allocator_that_it_was_started_for(kind: str) -> None:
    if why := allocators.refused("cpu").get(kind):
        pytest.skip(why)
    done = run(ENTER.format(kind), **allocators.environment(kind, {}))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("settings", [{}, {"LD_PRELOAD": "libnone.so"}, {"MALLOC_CONF": ""}])
def test_a_cell_that_did_not_get_jemalloc_with_its_pages_kept_does_not_run(settings: dict[str, str]) -> None:
    started = {} if not settings else {**allocators.environment("jemalloc", {}), **settings}
    done = run(ENTER.format("jemalloc"), **started)
    assert done.returncode == 1
    assert "memory does not come from jemalloc" in done.stderr


def test_what_is_not_there_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocators, "find_library", lambda _: None)
    monkeypatch.setattr(allocators, "_pool", lambda: None)
    assert allocators.refused("cpu") == {
        "pool": "the page pool is not compiled for this PyTorch (python -m lms.build torch)",
        "jemalloc": "libjemalloc is not installed (Debian: libjemalloc2)",
    }
    with pytest.raises(RuntimeError, match="page pool"):
        allocators.enter("pool")


def test_on_a_gpu_neither_allocates_tensors() -> None:
    assert set(allocators.refused("cuda")) == {"pool", "jemalloc"}


def test_what_the_user_preloads_stays_and_other_cells_start_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocators, "find_library", lambda _: "libjemalloc.so.2")
    preloaded = allocators.environment("jemalloc", {"LD_PRELOAD": "libmine.so"})["LD_PRELOAD"]
    assert preloaded == "libjemalloc.so.2:libmine.so"
    assert allocators.environment("jemalloc", {})["LD_PRELOAD"] == "libjemalloc.so.2"
    assert allocators.environment("pool", {}) == allocators.environment("lms", {}) == {}
    allocators.enter("plain")
