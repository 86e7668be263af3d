"""What the wheel of LMS holds, and what it leaves in the tree that it was built in."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_holds_the_package_the_sources_of_what_is_compiled_and_nothing_else(
    tmp_path: Path,
) -> None:
    tree = tmp_path / "lms"
    shutil.copytree(ROOT / "lms", tree, ignore=shutil.ignore_patterns("__pycache__", "dist"))
    (tree / "src/lms/native/page_pool-torch9.9-x86_64-0.so").write_bytes(b"as `make setup` leaves it")
    program = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"lms/native/page_pool.cc", "lms/templates/step.html", "lms/link/machines/gh200.json"} <= set(names)
    assert [name for name in names if name.endswith(".so")] == []
    modules = {str(path.relative_to(tree / "src")) for path in (tree / "src/lms").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
