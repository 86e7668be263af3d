"""Lock files; that none is made from the stand-in is in test_cli.py."""

import hashlib
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from rattler import RepoDataRecord
from small_channel import PLATFORM, Small

from bundle import explicit, install
from bundle.errors import ToolError

pytestmark = pytest.mark.timeout(600)  # the first test makes the small channel


def test_it_names_every_package_after_what_it_needs_with_its_checksum(small: Small) -> None:
    records = install.solve(["small"], small.channels)
    lines = explicit.text("mine", PLATFORM, records).splitlines()
    assert lines[1] == "@EXPLICIT"
    found = []
    for line in lines[2:]:
        address, _, checksum = line.partition("#")
        path = Path(unquote(urlsplit(address).path))
        assert hashlib.md5(path.read_bytes()).hexdigest() == checksum
        found.append(path.name.rsplit("-", 2)[0])
    assert found == ["python", "bascule-tools", "small"]


def test_a_package_whose_channel_says_no_checksum_cannot_be_named(small: Small) -> None:
    (record,) = install.solve(["python"], small.channels)
    path = Path(unquote(urlsplit(str(record.url)).path))
    bare = RepoDataRecord(record, record.file_name, record.url, record.channel or "")
    bare.md5 = None
    with pytest.raises(ToolError, match=f"{path.name} has no MD5"):
        explicit.text("mine", PLATFORM, [bare])
