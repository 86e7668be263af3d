import re
from pathlib import Path

import pytest

from ddl.launch.folders import readable


def test_a_plain_name_is_kept() -> None:
    folder = Path("/tmp/runs/1")
    with readable(folder) as name:
        assert name == folder


@pytest.mark.parametrize("part", ["peter", "OPEN", "Experiments", "my runs", "a,b", "10:30", "größe", "a;b"])
def test_another_gets_a_link_that_goes_again(tmp_path: Path, part: str) -> None:
    folder = tmp_path / part
    folder.mkdir()
    with readable(folder) as name:
        assert re.fullmatch(r"/tmp/ddlrun-[0-9a-f]{16}", str(name))
        assert name.samefile(folder)
    assert not name.is_symlink()
    assert folder.is_dir()
