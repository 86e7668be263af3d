"""Bills of materials by CycloneDX's schema, and that the schema would find what is wrong."""

import json
from pathlib import Path
from typing import Any

import bill_schema
import pytest

from bascule import inventory, sbom

PACKAGES = [
    inventory.Package(
        "lms", "0.1.0", "pyh1_0", "conda", "Apache-2.0", "conda-forge", ("python >=3.11",), "ab" * 32, "lms.conda"
    ),
    inventory.Package("python", "3.11.7", "0_cpython", "conda", "", "https://example.org/a b", (), "", "python.conda"),
    inventory.Package("odd", "1!2.0+local", "h_0", "conda", 'GPL-3.0-only "with words"', "", (), "", "odd.tar.bz2"),
    inventory.Package("snapml", "1.17.2", "", "pip", "IBM's, not an SPDX name", "", ("numpy>=1",), "", ""),
]


def written(folder: Path, document: Any) -> Path:
    path = folder / "bill.json"
    path.write_text(json.dumps(document))
    return path


def test_a_bill_of_every_kind_of_package_is_valid(tmp_path: Path) -> None:
    assert bill_schema.fault(written(tmp_path, sbom.document("mine", PACKAGES))) is None
    assert bill_schema.fault(written(tmp_path, sbom.document("empty", []))) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [("serialNumber", "urn:uuid:none"), ("components", [{"name": "x"}]), ("unknown", 1), ("version", "one")],
)
def test_a_bill_that_is_wrong_is_found(tmp_path: Path, key: str, value: object) -> None:
    document = dict(sbom.document("mine", PACKAGES))
    document[key] = value  # type: ignore[assignment]
    assert bill_schema.fault(written(tmp_path, document)) is not None
