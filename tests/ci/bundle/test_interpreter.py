import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from bundle import interpreter
from bundle.errors import BundleError
from bundle.wheel import PYTHON


def test_the_interpreter_runs_where_it_is_moved_with_the_library_of_its_own(tmp_path: Path) -> None:
    if reason := interpreter.obstacle():
        pytest.skip(reason)
    interpreter.stage(tmp_path / "stage")
    moved = (tmp_path / "stage").rename(tmp_path / "moved to here")
    program = "import json, ssl, sqlite3, sys, sysconfig; print(sys.prefix); print(sysconfig.get_path('purelib'))"
    variables = {"PATH": os.defpath}
    done = subprocess.run(
        [moved / "bin/python", "-c", program], env=variables, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == [str(moved), str(moved / f"lib/python{PYTHON}/site-packages")], done.stderr
    maps = "print(open('/proc/self/maps').read())"
    loaded = subprocess.run(
        [moved / "bin/python", "-c", maps], env=variables, capture_output=True, text=True, timeout=60
    )
    libraries = [line for line in loaded.stdout.splitlines() if "libpython" in line]
    assert bool(libraries) == bool(sysconfig.get_config_var("Py_ENABLE_SHARED"))
    assert all(str(moved) in line for line in libraries)
    assert not any((moved / f"lib/python{PYTHON}/site-packages").iterdir())


def test_one_with_another_layout_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\necho posix_local\n")
    other.chmod(0o755)
    monkeypatch.setattr(sys, "_base_executable", str(other))
    reason = interpreter.obstacle()
    assert reason is not None
    assert "make setup PYTHON=" in reason
    with pytest.raises(BundleError, match="keeps packages in other folders"):
        interpreter.stage(tmp_path / "stage")
    assert not (tmp_path / "stage").exists()
