"""Whether a bill of materials is one: CycloneDX's own schema says so."""

from __future__ import annotations

from pathlib import Path


def fault(path: Path) -> str | None:
    """What the strict schema of CycloneDX 1.6 has against the file (an unknown key counts too); None where nothing."""
    # Imported here: it takes a second, and every worker collects all tests.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    found = JsonStrictValidator(SchemaVersion.V1_6).validate_str(path.read_text())
    return None if found is None else f"{path.name}: {found!r}"
