"""The command `bascule` on environments that are made up of records."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bascule import care, inventory, sbom
from bascule.cli import main


def package(name: str, license_: str = "MIT", **more: Any) -> inventory.Package:
    given = {"version": "1.0", "build": "0", "manager": "conda", "channel": "", "depends": (), "sha256": "", "file": ""}
    return inventory.Package(name=name, license=license_, **given | more)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An environment with a bundle, one of its packages, and one that pip installed."""
    records = tmp_path / "conda-meta"
    records.mkdir()
    for record in (
        {"name": "bascule-base", "version": "0.1.0", "build": "h1_0", "license": "Apache-2.0",
         "depends": ["lms ==0.1.0", "ddl ==0.1.0"]},
        {"name": "lms", "version": "0.1.0", "build": "pyh1_0", "license": "Apache-2.0", "depends": ["python >=3.11"],
         "sha256": "ab" * 32, "fn": "lms-0.1.0-pyh1_0.conda", "channel": "file:///somewhere/here",
         "files": ["lib/python3.11/site-packages/bascule_lms-0.1.0.dist-info/METADATA"]},
        {"name": "readline", "version": "8.2", "build": "h2_1", "license": "GPL-3.0-only", "depends": [],
         "channel": "conda-forge"},
    ):  # fmt: skip
        (records / f"{record['name']}.json").write_text(json.dumps(record))
    site = tmp_path / "lib/python3.11/site-packages"
    for name, version, installer, licence in (
        ("bascule_lms", "0.1.0", "conda", "License-Expression: Apache-2.0"),
        ("snapml", "1.17.2", "pip", "License: International License Agreement"),
    ):
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{licence}\n")
        (folder / "INSTALLER").write_text(installer + "\n")
    return tmp_path


def test_an_environment_holds_what_conda_recorded_and_what_pip_installed_beside(prefix: Path) -> None:
    found = inventory.read(prefix)
    assert [(one.name, one.manager) for one in found] == [
        ("bascule-base", "conda"), ("lms", "conda"), ("readline", "conda"), ("snapml", "pip"),
    ]  # fmt: skip


def test_a_folder_that_is_no_environment_is_an_error_that_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--prefix", str(tmp_path)]) == 1
    assert f"{tmp_path} is no conda environment" in capsys.readouterr().err


def test_a_record_that_is_damaged_is_named(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (prefix / "conda-meta/lms.json").write_text('{"name": "lms"')
    assert main(["sbom", "--prefix", str(prefix)]) == 1
    assert "conda-meta/lms.json is no record of a package" in capsys.readouterr().err


def test_info_shows_the_pins_of_the_bundle_beside_what_is_there(
    prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--prefix", str(prefix)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["bundle", "bascule-base", "0.1.0"] in lines
    assert ["lms", "==0.1.0", "0.1.0", "pyh1_0"] in lines
    assert ["ddl", "==0.1.0", "MISSING"] in lines


@pytest.mark.parametrize(
    ("name", "license_", "word"),
    [
        ("snapml", "", "IBM"),
        ("snapml", "Apache-2.0", "IBM"),
        ("readline", "GPL-3.0-only", "GPL:"),
        ("thing", "GNU General Public License v3", "GPL:"),
        ("thing", "AGPL-3.0-or-later", "AGPL"),
        ("nvidia-cublas", "LicenseRef-NVIDIA", "CUDA"),
        ("thing", "LicenseRef-Proprietary", "not an open licence"),
        ("thing", "  ", "does not say"),
        ("thing", "GPL-2.0-only AND (Apache-2.0 WITH LLVM-exception)", "GPL"),
        ("thing", "MIT AND BUSL-1.1", "not an open licence"),
        ("thing", "CC-BY-NC-4.0", "not an open licence"),
        ("libcublas", "MIT", "NVIDIA"),
    ],
)
def test_a_licence_that_needs_care_is_marked_with_the_reason(name: str, license_: str, word: str) -> None:
    assert word in care.judge(package(name, license_)).care


@pytest.mark.parametrize(
    "license_",
    ["MIT", "BSD-3-Clause", "Apache-2.0", "PSF-2.0", "LGPL-2.1-or-later", "GNU Lesser General Public License v3",
     "GPL-3.0-only WITH GCC-exception-3.1", "MPL-2.0", "LicenseRef-OpenMPI"],
)  # fmt: skip
def test_a_licence_that_needs_none_is_not(license_: str) -> None:
    assert care.judge(package("libcurl", license_)).care == ""
    assert care.judge(package("thing", license_)).care == ""


def test_licenses_lists_every_package_and_counts_those_that_need_care(
    prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["licenses", "--prefix", str(prefix)]) == 0
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("!")] == ["readline", "snapml"]
    assert "International License Agreement for Non-Warranted Programs" in out
    assert "4 packages, 2 need care" in out
    assert main(["licenses", "--prefix", str(prefix), "--care", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["readline", "snapml"]


def test_a_bill_of_materials_names_every_package_once_and_what_each_needs(prefix: Path) -> None:
    found = inventory.read(prefix)
    document: Any = sbom.document("mine", found, datetime(2026, 11, 22, tzinfo=UTC))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert document["metadata"]["timestamp"] == "2026-11-22T00:00:00Z"
    references = [one["bom-ref"] for one in document["components"]]
    assert len(references) == len(set(references)) == len(found)
    assert references == [
        "pkg:conda/bascule-base@0.1.0?build=h1_0",
        "pkg:conda/lms@0.1.0?build=pyh1_0&type=conda",
        "pkg:conda/readline@8.2?build=h2_1&channel=conda-forge",
        "pkg:pypi/snapml@1.17.2",
    ]
    needs = {one["ref"]: one["dependsOn"] for one in document["dependencies"]}
    assert needs[references[0]] == [references[1]]  # ddl is not installed
    (lms,) = (one for one in document["components"] if one["name"] == "lms")
    assert lms["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}]
    assert lms["licenses"] == [{"expression": "Apache-2.0"}]
    assert not any("scope" in one for one in document["components"])
    document = sbom.document("mine", found[:3], optional=[package("snapml", "", version="1.17.2", manager="pip")])
    assert [one.get("scope") for one in document["components"]] == [None, None, None, "optional"]
    assert document["components"][3]["purl"] == "pkg:pypi/snapml@1.17.2"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "MIT AND (GPL-3.0-only WITH GCC-exception-3.1)",
            {"expression": "MIT AND (GPL-3.0-only WITH GCC-exception-3.1)"},
        ),
        ("LicenseRef-OpenMPI", {"expression": "LicenseRef-OpenMPI"}),
        ("GNU General Public License v3", {"license": {"name": "GNU General Public License v3"}}),
        ("BSD", {"license": {"name": "BSD"}}),  # which of them?
    ],
)
def test_a_licence_of_spdx_is_an_expression_and_any_other_a_name(said: str, expected: dict[str, Any]) -> None:
    (component,) = sbom.document("mine", [package("thing", said)])["components"]  # type: ignore[misc]
    assert component["licenses"] == [expected]  # type: ignore[call-overload,index]


def test_a_second_name_of_the_library_folder_brings_no_package_twice(prefix: Path) -> None:
    """conda-forge's Pythons have lib/python3.1 as a link."""
    (prefix / "lib/python3.1").symlink_to("python3.11")
    found = inventory.read(prefix)
    assert [one.name for one in found] == ["bascule-base", "lms", "readline", "snapml"]


def test_a_bill_of_materials_names_no_folder_of_this_machine(prefix: Path) -> None:
    assert "somewhere" not in json.dumps(sbom.document("mine", inventory.read(prefix)))


def test_two_bills_of_one_environment_have_the_same_number(prefix: Path) -> None:
    found = inventory.read(prefix)
    first, second = sbom.document("mine", found), sbom.document("mine", list(found))
    assert first["serialNumber"] == second["serialNumber"]
    assert sbom.document("mine", found[1:])["serialNumber"] != first["serialNumber"]


def test_help_teaches_by_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "bascule licenses --care" in capsys.readouterr().out
