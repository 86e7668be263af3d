"""Random trainings with slow copies, whose state, parameters and gradients are away between uses: plain's bits.

One alone, paged: `python tests/lms/torch/campaign/random_trainings.py SEED 1`, with lms/src on PYTHONPATH.
"""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from lms import build
from lms.torch import state
from lms.torch.cpu import page_pool
from lms.torch.cuda.pager import CudaPager
from random_trainings import compare
from slow_disk import slow_disk

PROGRAM = Path(__file__).with_name("random_trainings.py")
TRAININGS = 120
needs_pool = pytest.mark.skipif(page_pool.find() is None, reason="no page pool: python -m lms.build torch")

Edit = tuple[str, str]  # a text that the pager's source has once, and another for it
SLOW: list[Edit] = [
    (f"int {name}_all(int file, {kind} {word}, std::size_t nbytes, std::uint64_t offset) {{\n",
     f"int {name}_all(int file, {kind} {word}, std::size_t nbytes, std::uint64_t offset) {{\n"
     "    std::this_thread::sleep_for(std::chrono::microseconds(std::rand() % 4 == 0 ? std::rand() % 3000 : 0));\n")
    for name, kind, word in (("write", "const char*", "from"), ("read", "char*", "to"))
]  # fmt: skip
BUGS: dict[str, Edit] = {
    "missing wait: half of the pages come back before they were read": (
        "read_all(piece.file, static_cast<char*>(pages), nbytes, piece.offset)",
        "read_all(piece.file, static_cast<char*>(pages), nbytes / 2, piece.offset)",
    ),
    "a page dropped dirty: it leaves without being written to the file": (
        "    if (piece.state == State::kDirty) {\n",
        "    if (piece.state == State::kDirty && piece.positions.size() < 2) {\n",
    ),
    "wrong offset: all pieces of a block have one place": (
        "        piece.offset = offset + start;\n",
        "        piece.offset = offset;\n",
    ),
    "stale version: the access is revoked after the copy out": (
        "    piece.lifted = readers_ == 0 && pool_.wants(piece.nbytes) ? lift(piece) : nullptr;\n"
        "    if (piece.state == State::kDirty) {\n"
        "        if (piece.lifted == nullptr && !allow(piece, PROT_READ)) return false;\n",
        "    if (piece.state == State::kDirty) {\n",
    ),
    "a page dropped dirty: a write to what came back is not noticed": (
        "        piece.state = State::kDirty;\n        return true;\n",
        "        if (piece.state != State::kClean) piece.state = State::kDirty;\n        return true;\n",
    ),
    "a page dropped dirty: what came back to be written is taken for unchanged": (
        "    piece.state = writable ? State::kDirty : State::kClean;\n",
        "    piece.state = State::kClean;\n",
    ),
    "early release: the pages leave before the access is revoked": (
        "    if (!allow(piece, PROT_NONE)) return nullptr;\n",
        "",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trainings_whose_state_moves_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(state, "_pager", lambda *_: None)
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(1000, 1000 + TRAININGS):
            with monkeypatch.context() as patch:
                patch.setattr("lms.torch.state_pager.CHUNK", (1000, 300_000, 32 << 20)[seed % 3])
                with slow_disk(seed):
                    wrong = compare(seed, ("activations", "optimizer"))
            assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trainings_in_managed_memory(monkeypatch: pytest.MonkeyPatch, one_thread: None, paper: ModuleType) -> None:
    memory = paper.PaperManaged(paper.PaperStreams(), prompt=True)
    monkeypatch.setattr(state, "make_pager", lambda _: CudaPager(memory.streams, memory))
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(2000, 2000 + TRAININGS):
            monkeypatch.setattr(CudaPager, "least", (1, 5000)[seed % 2])
            wrong = compare(seed, ("activations", "optimizer", "parameters", "gradients"))
            assert not wrong, wrong
    gc.collect()
    assert not memory.sizes


@pytest.fixture(scope="module")
def pagers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[Edit]], Path]:
    """Compiles the pager with edits; returns the folder of its sources."""

    def compiled(edits: list[Edit]) -> Path:
        folder = tmp_path_factory.mktemp("pager") / "native"
        shutil.copytree(build.NATIVE, folder, ignore=shutil.ignore_patterns("page_pool-*", ".build-*"))
        source = folder / "pager.cc"
        text = "#include <cstdlib>\n" + source.read_text()
        for old, new in edits:
            assert text.count(old) == 1, f"the pager has changed; edit this anew: {old}"
            text = text.replace(old, new)
        source.write_text(text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "NATIVE", folder)
            build.build(build.POOL)
        return folder

    return compiled


def trained(folder: Path, first: int, count: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), str(first), str(count), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)


@needs_pool
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trainings_whose_state_is_paged(pagers: Callable[[list[Edit]], Path]) -> None:
    run = trained(pagers(SLOW), 2000, TRAININGS)
    assert run.stdout == f"{TRAININGS} trainings are identical\n", run.stdout + run.stderr


@needs_pool
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_the_pager_is_found(bug: str, pagers: Callable[[list[Edit]], Path]) -> None:
    run = trained(pagers([*SLOW, BUGS[bug]]), 3000, TRAININGS)
    print(f"\n{bug}: {run.returncode}: {(run.stdout + run.stderr)[-200:]}")
    assert "seed" in run.stdout or run.returncode < 0, f"{TRAININGS} trainings did not show it: {run.stderr}"
