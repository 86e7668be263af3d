"""The bill of materials of an image: its environment's, as `bascule sbom` there writes it, and Debian's packages."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

from images.engine import Engine

Json = dict[str, Any]  # a CycloneDX document or a part of one


def make(engine: Engine, reference: str, name: str) -> Json:
    """The bill of a finished image, in CycloneDX's form. Raises BundleError."""
    document: Json = json.loads(engine.output(reference, "/opt/conda/bin/bascule", "sbom", "--name", name))
    debian = engine.output(reference, "cat", "/var/lib/dpkg/status")
    release = engine.output(reference, "cat", "/etc/os-release")
    document["metadata"]["component"]["type"] = "container"
    document["components"] += operating_system(release, debian)
    return document


def operating_system(release: str, status: str) -> list[Json]:
    """The components that /etc/os-release and dpkg's status file name."""
    fields = dict(re.findall(r'^([A-Z_]+)="?([^"\n]*)"?$', release, re.MULTILINE))
    distribution, version = fields.get("ID", "linux"), fields.get("VERSION_ID", "")
    reference = f"operating-system:{distribution}@{version}"
    components: list[Json] = [
        {"type": "operating-system", "bom-ref": reference, "name": distribution, "version": version}
    ]
    for paragraph in status.split("\n\n"):
        one = dict(re.findall(r"^([A-Za-z-]+): (.*)$", paragraph, re.MULTILINE))
        if one.get("Status", "").endswith(" installed"):
            purl = (
                f"pkg:deb/{distribution}/{quote(one['Package'])}@{quote(one['Version'], safe='')}"
                f"?arch={one['Architecture']}&distro={distribution}-{version}"
            )
            components.append(
                {"type": "library", "bom-ref": purl, "name": one["Package"], "version": one["Version"], "purl": purl}
            )
    return components
