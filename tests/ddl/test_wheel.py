"""The content of DDL's wheel, if libddl comes from another package, as in recipes/ddl."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_holds_the_sources_of_the_backend_and_no_library_of_this_machine(tmp_path: Path) -> None:
    tree = tmp_path / "ddl"
    shutil.copytree(ROOT / "ddl", tree, ignore=shutil.ignore_patterns("__pycache__", "dist", "build"))
    (tree / "src/ddl/native/backend-torch9.9-x86_64-0.so").write_bytes(b"as `make setup` leaves it")
    build = "build_wheel(sys.argv[1], {'wheel.cmake': 'false'})"
    program = f"import sys; from scikit_build_core.build import build_wheel; {build}"
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "ddl/native/backend.cc" in names
    assert [name for name in names if name.endswith(".so")] == []
