"""Finding and loading libddl.so."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddl import errors, library

ROOT = Path(__file__).parents[2]


def test_the_library_is_found_and_its_interface_is_this_package_s() -> None:
    path = library.find()
    assert path.name == "libddl.so"
    assert library.load().ddl_version() // 100 == library.VERSION[0] * 100 + library.VERSION[1]


def test_it_shows_the_functions_of_its_headers_and_nothing_else() -> None:
    nm = shutil.which("nm")
    assert nm, "nm is missing: install binutils"
    symbols = subprocess.run(
        [nm, "--dynamic", "--defined-only", "--format=posix", library.find()],
        capture_output=True,
        text=True,
        check=True,
    )
    shown = {line.split()[0] for line in symbols.stdout.splitlines()}
    headers = [path.read_text() for path in sorted((ROOT / "ddl/include").glob("*.h"))]
    declared = set(re.findall(r"DDL_API [^;(]*?\b(ddl_\w+)\(", "\n".join(headers)))
    assert len(declared) == 39
    assert shown == declared


def test_python_declares_every_function_that_takes_arguments() -> None:
    declared = set(re.findall(r"DDL_API [^;(]*?\b(ddl_\w+)\(", (ROOT / "ddl/include/ddl.h").read_text()))
    assert declared - set(library._FUNCTIONS) == {"ddl_version", "ddl_error_string", "ddl_last_error"}


def test_every_result_code_has_an_exception_of_its_own() -> None:
    header = (ROOT / "ddl/include/ddl.h").read_text()
    codes = {int(code): name for name, code in re.findall(r"DDL_ERROR_(\w+) = (\d+)", header)}
    kinds = {code: type(errors.error_of(code, "words")) for code in codes}
    assert len(set(kinds.values())) == len(codes) == 10
    assert all(issubclass(kind, errors.DDLError) for kind in kinds.values())
    assert issubclass(kinds[1], ValueError)


def test_where_it_is_missing_the_error_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDL_LIBRARY", str(tmp_path / "libddl.so"))
    with pytest.raises(errors.LibraryError, match=f"{tmp_path}.*make setup.*DDL_LIBRARY"):
        library.find()


def test_a_file_that_is_no_library_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    fake = tmp_path / "libddl.so"
    fake.write_text("no library")
    code = "import ddl; ddl.init()"
    variables = {"PYTHONPATH": str(ROOT / "ddl/src"), "DDL_LIBRARY": str(fake)}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "LibraryError" in done.stderr
    assert "It needs the MPI that it was built with" in done.stderr


def test_importing_ddl_does_not_load_it() -> None:
    # ddlrun imports the package on hosts where MPI may be missing.
    code = "import ddl; print('libddl' in open('/proc/self/maps').read())"
    variables = {"PYTHONPATH": str(ROOT / "ddl/src")}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=30)
    assert done.stdout == "False\n", done.stderr


def test_a_link_to_the_library_loads_it_from_where_it_lies(tmp_path: Path) -> None:
    """Its own place says where MPI is: a conda package of this one holds a link to it (recipes/ddl)."""
    link = tmp_path / "libddl.so"
    link.symlink_to(library.find())
    program = "from ddl import library; print(library.load()._name)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"DDL_LIBRARY": str(link), "PYTHONPATH": str(ROOT / "ddl/src")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == str(library.find().resolve()), done.stderr
