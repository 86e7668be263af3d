import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(out: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OUT": str(out), "PYTHON": sys.executable} | variables
    return subprocess.run([ROOT / "ci/gpu_check"], env=environment, capture_output=True, text=True, timeout=110)


def test_without_a_gpu_it_fails_and_says_so_because_nothing_was_checked(tmp_path: Path) -> None:
    done = run(tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "sees no GPU" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_torch_it_says_how_to_name_another_python(tmp_path: Path) -> None:
    bare = tmp_path / "python3"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # no packages
    bare.chmod(0o755)
    done = run(tmp_path / "out", PYTHON=str(bare))
    assert done.returncode == 1
    assert "name another: make gpu-check PYTHON=" in done.stderr
