from pathlib import Path

import pytest

from ddl import library
from ddl.bench import contestants
from ddl.launch.errors import CheckError


def test_the_programs_are_found_beside_a_library_that_is_a_link_as_in_conda_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, lib, programs = (tmp_path / name for name in ("site-packages/ddl", "lib", "libexec"))
    for folder in (package / "bench", lib, programs):
        folder.mkdir(parents=True)
    (lib / library.NAME).touch()
    (programs / "bench_ddl").touch()
    (package / library.NAME).symlink_to(lib / library.NAME)
    (package / "bench/bench_ddl").symlink_to(programs / "bench_ddl")
    monkeypatch.setattr(library, "find", lambda: package / library.NAME)
    assert contestants._worker("bench_ddl").samefile(programs / "bench_ddl")
    with pytest.raises(CheckError, match=f"bench_mpi is not beside {library.NAME} in {lib}"):
        contestants._worker("bench_mpi")
