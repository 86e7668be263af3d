"""The command `bascule` on environments that are made up of records."""

from __future__ import annotations

import json
import shutil
import sys
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
    assert f"{tmp_path} is no environment" in capsys.readouterr().err


def test_an_environment_without_conda_has_what_pip_installed(prefix: Path) -> None:
    shutil.rmtree(prefix / "conda-meta")
    assert [package.name for package in inventory.read(prefix)] == ["snapml"]


@pytest.mark.parametrize(
    ("words", "program", "first"),
    [(["lms", "run", "x.py"], "lms", ["run", "x.py"]), (["ddlrun", "--help"], "ddlrun", ["--help"]),
     (["doctor"], "ddlrun", ["doctor"])],
)  # fmt: skip
def test_a_command_of_another_package_becomes_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], program: str, first: list[str]
) -> None:
    (tmp_path / "python").touch()
    (tmp_path / program).write_text(f'#!/bin/sh\necho {program} "$@"\nexit 3\n')
    (tmp_path / program).chmod(0o755)
    called: list[list[str]] = []

    def become(path: str, command: list[str]) -> None:
        called.append([path, *command])
        raise SystemExit(3)

    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("os.execv", become)
    with pytest.raises(SystemExit):
        main(words)
    assert called == [[str(tmp_path / program), program, *first]]


def test_a_program_that_is_not_installed_is_said_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["lms", "--version"]) == 1
    assert "the program lms is not installed: install bascule-lms" in capsys.readouterr().err


def test_a_record_that_is_damaged_is_named(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (prefix / "conda-meta/lms.json").write_text('{"name": "lms"')
    assert main(["sbom", "--prefix", str(prefix)]) == 1
    assert "conda-meta/lms.json is no record of a package" in capsys.readouterr().err


def test_info_shows_the_pins_of_the_bundle_beside_what_is_there(
    prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def info() -> tuple[int, list[list[str]], str]:
        status = main(["info", "--prefix", str(prefix)])
        said = capsys.readouterr()
        return status, [line.split() for line in said.out.splitlines()], said.err

    status, lines, errors = info()
    assert ["bundle", "bascule-base", "0.1.0"] in lines
    assert ["lms", "==0.1.0", "0.1.0", "pyh1_0"] in lines
    assert ["ddl", "==0.1.0", "MISSING"] in lines
    assert status == 1
    assert "bascule-base is not as it was tested: ddl is missing or does not fit; install bascule-base again" in errors
    record = {"name": "ddl", "version": "0.2.0", "build": "h1_0", "license": "Apache-2.0", "depends": []}
    (prefix / "conda-meta/ddl.json").write_text(json.dumps(record))
    status, lines, _ = info()
    assert ["ddl", "==0.1.0", "0.2.0", "h1_0", "DOES", "NOT", "FIT"] in lines
    assert status == 1
    (prefix / "conda-meta/ddl.json").write_text(json.dumps(record | {"version": "0.1.0"}))
    status, lines, errors = info()
    assert ["ddl", "==0.1.0", "0.1.0", "h1_0"] in lines
    assert (status, errors) == (0, "")


def test_a_bundle_that_another_needs_is_part_of_the_set(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, depends in (
        ("ddl", []),
        ("bascule-pytorch", ["bascule-base 0.1.0 h2_0", "__linux"]),
        ("bascule-caffe-pytorch", ["bascule-pytorch 0.1.0 h1_0", "bascule-caffe ==0.1.0"]),
    ):
        record = {"name": name, "version": "0.1.0", "build": "h1_0", "license": "Apache-2.0", "depends": depends}
        (prefix / f"conda-meta/{name}.json").write_text(json.dumps(record))
    assert main(["info", "--prefix", str(prefix)]) == 1
    said = capsys.readouterr()
    assert "bascule-pytorch is not as it was tested: bascule-base is missing or does not fit" in said.err
    assert "bascule-caffe-pytorch is not as it was tested: bascule-caffe is missing or does not fit" in said.err
    assert "__linux" not in said.out


def test_without_a_bundle_nothing_of_it_is_missing(prefix: Path) -> None:
    (prefix / "conda-meta/bascule-base.json").unlink()
    assert main(["info", "--prefix", str(prefix)]) == 0


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
        ("nvidia-cudnn", "LicenseRef-NVIDIA-Proprietary OR MIT", "NVIDIA"),
        ("nvidia-thing", "", "NVIDIA"),
        ("thing", "UNKNOWN", "does not say"),
        ("thing", "LICENSE.txt", "does not say"),
        ("thing", "see the license file", "does not say"),
        ("thing", "GPL-3.0-only OR AGPL-3.0-only", "GPL:"),
        ("thing", "MIT AND (GPL-3.0-only OR LicenseRef-Proprietary)", "GPL:"),
        ("thing", "(MIT OR Apache-2.0) AND GPL-3.0-only", "GPL:"),
        ("thing", "MIT) AND GPL-3.0-only", "GPL:"),
        ("thing", "GNU General Public License v3 (GPLv3)", "GPL:"),
        ("thing", "LicenseRef-Nobody-Knows", "a licence of its own"),
    ],
)
def test_a_licence_that_needs_care_is_marked_with_the_reason(name: str, license_: str, word: str) -> None:
    assert word in care.judge(package(name, license_)).care


@pytest.mark.parametrize(
    "license_",
    ["MIT", "BSD-3-Clause", "Apache-2.0", "PSF-2.0", "LGPL-2.1-or-later", "GNU Lesser General Public License v3",
     "GPL-3.0-only WITH GCC-exception-3.1", "MPL-2.0", "LicenseRef-OpenMPI", "LicenseRef-Public-Domain",
     "MIT OR GPL-2.0-only", "GPL-2.0-only OR (MIT AND BSD-3-Clause)", "GPL-3.0-only OR GPL-2.0-only OR MPL-2.0",
     "Apache License (2.0)"],
)  # fmt: skip
def test_a_licence_that_needs_none_is_not(license_: str) -> None:
    assert care.judge(package("libcurl", license_)).care == ""
    assert care.judge(package("thing", license_)).care == ""


@pytest.mark.parametrize("license_", ["BSD-3-Clause", "BSD", "Apache-2.0 WITH LLVM-exception"])
def test_what_is_nvidias_and_open_needs_no_care(license_: str) -> None:
    assert care.judge(package("nvidia-ml-py", license_)).care == ""


def installed_by(installer: str | None, prefix: Path, *said: str) -> None:
    folder = prefix / "lib/python3.11/site-packages/another-2.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", "Name: another", "Version: 2.0", *said, ""]))
    if installer is not None:
        (folder / "INSTALLER").write_text(f"{installer}\n")


@pytest.mark.parametrize("installer", ["pip", "uv", "poetry 2.1", None])
def test_what_any_other_installer_brought_is_in_the_inventory(prefix: Path, installer: str | None) -> None:
    installed_by(installer, prefix, "License: UNKNOWN", "Classifier: License :: OSI Approved :: MIT License")
    (found,) = (one for one in inventory.read(prefix) if one.name == "another")
    assert (found.manager, found.version, found.license) == ("pip", "2.0", "MIT License")


def test_what_a_conda_package_brought_is_there_once_whatever_it_calls_its_installer(prefix: Path) -> None:
    installed_by("uv", prefix)
    record = {"name": "another", "version": "2.0", "license": "MIT",
              "files": ["lib/python3.11/site-packages/another-2.0.dist-info/RECORD"]}  # fmt: skip
    (prefix / "conda-meta/another.json").write_text(json.dumps(record))
    assert [one.manager for one in inventory.read(prefix) if one.name == "another"] == ["conda"]


def test_what_is_left_of_a_removed_package_is_none(prefix: Path) -> None:
    (prefix / "lib/python3.11/site-packages/~nother-2.0.dist-info").mkdir()
    assert [one.name for one in inventory.read(prefix)] == ["bascule-base", "lms", "readline", "snapml"]


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
