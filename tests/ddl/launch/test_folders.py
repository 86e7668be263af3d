from pathlib import Path

import pytest

from ddl.launch.folders import readable


def test_a_name_without_pe_is_kept(tmp_path: Path) -> None:
    folder = Path("/tmp/runs/1")
    with readable(folder) as name:
        assert name == folder


@pytest.mark.parametrize("part", ["peter", "OPEN", "Experiments"])
def test_another_gets_a_link_that_goes_again(tmp_path: Path, part: str) -> None:
    folder = tmp_path / part
    folder.mkdir()
    with readable(folder) as name:
        assert "pe" not in str(name).lower()
        assert name.samefile(folder)
    assert not name.is_symlink()
    assert folder.is_dir()
