from pathlib import Path

import pytest

from ddl import library
from ddl.bench import contestants
from ddl.launch.errors import CheckError


@pytest.mark.parametrize(
    "folder", ["lib/bench", "lib", "libexec/ddl"]
)  # of a wheel, of a build, of an installed libddl
def test_the_programs_are_found_from_where_the_library_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    for name in (f"lib/{library.NAME}.0", f"{folder}/bench_ddl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    link = tmp_path / "lib" / library.NAME
    link.symlink_to(f"{library.NAME}.0")
    monkeypatch.setattr(library, "find", lambda: link)
    assert contestants._worker("bench_ddl") == tmp_path / folder / "bench_ddl"
    with pytest.raises(CheckError, match=f"bench_mpi is not beside {library.NAME} in {tmp_path / 'lib'}"):
        contestants._worker("bench_mpi")
