import json
from pathlib import Path

import pytest
from small_channel import Small

from bascule import inventory, sbom
from bundle import channel, install, materials

pytestmark = pytest.mark.timeout(600)  # the first test makes the small channel


def test_the_bill_of_what_was_solved_is_that_of_what_is_installed(small: Small, tmp_path: Path) -> None:
    records = channel.solve(["small"], small.channels)
    prefix = tmp_path / "env"
    install.install(records, prefix)
    materials.write("mine", [*map(materials.of_conda, records)], tmp_path / "mine.cdx.json")
    before = json.loads((tmp_path / "mine.cdx.json").read_text())
    after = json.loads(json.dumps(sbom.document("mine", inventory.read(prefix))))
    for document in (before, after):
        del document["metadata"]["timestamp"]
    assert before == after
    assert {one["name"] for one in before["components"]} == {"small", "bascule-tools", "python"}
    assert all(len(one["hashes"][0]["content"]) == 64 for one in before["components"])
    assert str(tmp_path) not in json.dumps(before)


def test_what_a_pip_step_would_bring_is_optional_until_it_has_brought_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.cdx.json"
    step = ["snapml ==1.17.2"]
    materials.write("mine", [], path, step)
    (found,) = json.loads(path.read_text())["components"]
    assert (found["purl"], found["scope"]) == ("pkg:pypi/snapml@1.17.2", "optional")
    there = inventory.Package("snapml", "1.17.2", "", "pip", "", "", (), "", "")
    materials.write("mine", [there], path, step)
    (found,) = json.loads(path.read_text())["components"]
    assert "scope" not in found


def test_a_lock_file_names_each_package_after_what_it_needs_by_its_address_and_checksum(small: Small) -> None:
    head, mark, *lines = materials.explicit("mine", "linux-64", channel.solve(["small"], small.channels)).splitlines()
    assert (head[0], mark) == ("#", "@EXPLICIT")
    assert [line.rpartition("/")[2].partition("-")[0] for line in lines] == ["python", "bascule", "small"]
    assert all(len(line.partition("#")[2]) == 32 for line in lines)
