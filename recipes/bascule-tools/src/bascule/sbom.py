"""The bill of materials of an environment, in CycloneDX 1.6 (https://cyclonedx.org/docs/1.6/json)."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

import bascule
from bascule.inventory import Package

Json = str | int | Sequence["Json"] | Mapping[str, "Json"]
_PIP_NAME = re.compile(r"[-_.]+")
# Those that a scanner reads; of SPDX's list (https://spdx.org/licenses) what environments here are likely to hold.
_SPDX = frozenset(
    (
        "0BSD", "AGPL-3.0-only", "AGPL-3.0-or-later", "Apache-2.0", "Artistic-2.0", "BSD-2-Clause", "BSD-3-Clause",
        "BSD-3-Clause-LBNL", "BSL-1.0", "CC-BY-4.0", "CC0-1.0", "EPL-2.0", "FTL", "GPL-2.0-only", "GPL-2.0-or-later",
        "GPL-3.0-only", "GPL-3.0-or-later", "HPND", "IJG", "ISC", "LGPL-2.0-or-later", "LGPL-2.1-only",
        "LGPL-2.1-or-later", "LGPL-3.0-only", "LGPL-3.0-or-later", "MIT", "MIT-0", "MIT-CMU", "MPL-1.1", "MPL-2.0",
        "NCSA", "OFL-1.1", "OpenSSL", "PSF-2.0", "Python-2.0", "UPL-1.0", "Unlicense", "ZPL-2.1", "Zlib",
        "bzip2-1.0.6", "libpng-2.0",
        "Classpath-exception-2.0", "GCC-exception-3.1", "LLVM-exception",
    )
)  # fmt: skip
_OPERATORS = re.compile(r"\bAND\b|\bOR\b|\bWITH\b|[()]")
_FIRST_WORD = re.compile(r"[^\s=<>!~;\[(@]+")


def document(
    name: str, packages: Sequence[Package], when: datetime | None = None, optional: Sequence[Package] = ()
) -> dict[str, Json]:
    """The document for an environment called `name`; `when` it was made, in UTC, is now where nobody says.

    `optional` are packages that a user may add, and that are not in it.
    """
    moment = (when or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")
    references = {_key(package): purl(package) for package in (*packages, *optional)}
    components: list[Json] = []
    dependencies: list[Json] = []
    for package in (*packages, *optional):
        reference = purl(package)
        component: dict[str, Json] = {
            "type": "library",
            "bom-ref": reference,
            "name": package.name,
            "version": package.version,
            "purl": reference,
        }
        if package in optional:
            component["scope"] = "optional"
        if package.license:
            component["licenses"] = [_license(package.license)]
        if package.sha256:
            component["hashes"] = [{"alg": "SHA-256", "content": package.sha256}]
        components.append(component)
        wanted = {_required(package, requirement) for requirement in package.depends}
        dependencies.append(
            {"ref": reference, "dependsOn": sorted({references[key] for key in wanted & set(references)})}
        )
    # Two documents of the same environment have the same number.
    number = uuid.uuid5(uuid.NAMESPACE_URL, "\n".join([name, *sorted(references.values())]))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{number}",
        "version": 1,
        "metadata": {
            "timestamp": moment,
            "tools": {"components": [{"type": "application", "name": "bascule", "version": bascule.__version__}]},
            "component": {"type": "application", "bom-ref": f"environment:{name}", "name": name},
        },
        "components": components,
        "dependencies": dependencies,
    }


def _license(said: str) -> Json:
    """What a package says of its licence: as an expression where all its parts are SPDX's, else as a name."""
    parts = [part.strip() for part in _OPERATORS.split(said)]
    if all(part in _SPDX or part.startswith("LicenseRef-") for part in parts if part) and any(parts):
        return {"expression": said.strip()}
    return {"license": {"name": said}}


def purl(package: Package) -> str:
    """The package's URL (https://github.com/package-url/purl-spec), without the channel's folder of this machine."""
    if package.manager == "pip":
        return f"pkg:pypi/{_PIP_NAME.sub('-', package.name).lower()}@{quote(package.version)}"
    words = {"build": package.build}
    channel = urlsplit(package.channel)
    if channel.scheme in ("http", "https") or (package.channel and not channel.scheme and "/" not in package.channel):
        words["channel"] = package.channel.rstrip("/")
    if package.file:
        words["type"] = "conda" if package.file.endswith(".conda") else "tar.bz2"
    query = "&".join(f"{key}={quote(value, safe='')}" for key, value in sorted(words.items()) if value)
    return f"pkg:conda/{quote(package.name)}@{quote(package.version)}" + (f"?{query}" if query else "")


def _key(package: Package) -> tuple[str, str]:
    name = package.name.lower()
    return (package.manager, _PIP_NAME.sub("-", name) if package.manager == "pip" else name)


def _required(package: Package, requirement: str) -> tuple[str, str]:
    """The key of what a requirement names, of the same manager."""
    found = _FIRST_WORD.match(requirement.strip())
    name = (found[0] if found else "").lower()
    return (package.manager, _PIP_NAME.sub("-", name) if package.manager == "pip" else name)
