"""The benchmark's command line."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import allocators
import pytest

BENCH = Path(__file__).parents[3] / "lms" / "bench"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_main", BENCH / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_main"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--models=vgg", "expected some of resnet, gpt, unet"),
        ("--shares=75,x", "percentages from 0 to 100"),
        ("--shares=120", "percentages from 0 to 100"),
        ("--rounds=0", "whole number of 1 or more"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_allowed(
    bench: ModuleType, argument: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        bench.main([argument])
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


def test_a_missed_target_is_printed_with_its_figures(bench: ModuleType) -> None:
    verdict = bench.Verdict("lms-35%", "step time", 1.3, 1.12, False, "ratio", "the disk could hide the bytes")
    assert "MISSED     lms-35%      step time: 1.3, target 1.12 (the disk could" in bench.verdict_lines("t", [verdict])


def test_the_machine_is_described(bench: ModuleType) -> None:
    pytest.importorskip("torch")
    assert bench.machine().keys() >= {"processor", "cores", "memory", "kernel", "python", "torch"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_run_writes_every_cell_and_finds_the_same_bits(tmp_path: Path) -> None:
    refused = allocators.refused("cpu")
    argv = [sys.executable, str(BENCH), "--quick", "--models=gpt", "--shares=35,0", "--rounds=1", "--threads=1"]
    done = subprocess.run([*argv, "--no-swap", "-o", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "bench.json").read_text())
    gpt = document["models"]["gpt"]
    others = ["plain-again", "pool", "jemalloc", "checkpoint", "lms-fits", "lms-35%", "lms-0%"]
    assert list(gpt["cells"]) == ["plain", *others]
    ran = {name: cell for name, cell in gpt["cells"].items() if name not in refused}
    assert all(cell["ratio"]["count"] == 1 for cell in ran.values())
    for name, why in refused.items():
        assert gpt["cells"][name]["note"] == f"not run: {why}"
    if "pool" in ran:
        assert ran["pool"]["over_pool"]["median"] == 1
    same = [verdict for verdict in gpt["verdicts"] if verdict["figure"] == "identical"]
    assert [verdict["cell"] for verdict in same] == [name for name in others if name in ran]
    assert all(verdict["reached"] for verdict in same)
    assert gpt["cells"]["lms-0%"]["steps"][-1]["session"]["last_out"] > 0
    assert "machine" in document
    assert "definitions" in document
