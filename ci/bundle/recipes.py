"""The recipes as py-rattler-build renders them: which packages they make, of what, and with what."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import rattler_build
import yaml

from bundle.errors import BundleError
from bundle.folders import Folders, checksum

Variants = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Package:
    """One variant of one package."""

    recipe: Path  # its recipe.yaml
    name: str
    file: str  # the name of its file
    place: str  # of the file, below a channel
    builds_with: frozenset[str]  # names
    runs_with: frozenset[str]
    tests_with: frozenset[str]
    content: str  # a checksum of the rendered recipe and its sources


def variants(where: Folders, only: Variants) -> dict[str, list[str]]:
    """conda_build_config.yaml, with `only` these values of some variants."""
    known: dict[str, list[str]] = yaml.safe_load((where.tree / "conda_build_config.yaml").read_text())
    return known | {name: list(values) for name, values in only.items()}


def packages(where: Folders, platform: str, chosen: Variants) -> list[Package]:
    """All variants of all packages. Raises BundleError."""
    found = []
    once = cache(checksum)  # many packages have their sources in common
    for path in [*sorted(where.tree.glob("recipes/*/recipe.yaml")), _metapackages(where, chosen)]:
        for one in render(path, platform, chosen):
            document = one.recipe.to_dict()
            build, package = document["build"], document["package"]
            needs, tests = document.get("requirements", {}), document.get("tests", [])
            if not tests:
                raise BundleError(f"{path}: {package['name']} has no tests, and would count as tested: add `tests:`")
            file = f"{package['name']}-{package['version']}-{build['string']}.conda"
            made_of = [path.parent, *(path.parent / str(source["path"]) for source in document.pop("source", ()))]
            content = [once(part.resolve()) for part in made_of]
            found.append(
                Package(
                    path, package["name"], file, f"{'noarch' if build.get('noarch') else platform}/{file}",
                    _names(needs.get("build", ()), needs.get("host", ())),
                    _names(needs.get("run", ())),
                    _names(*(test.get("requirements", {}).get("run", ()) for test in tests)),
                    digest(document, content),
                )
            )  # fmt: skip
    return found


def render(path: Path, platform: str, chosen: Variants) -> list[rattler_build.RenderedVariant]:
    """All variants of all packages of a recipe.yaml. Raises BundleError."""
    target = rattler_build.RenderConfig(platform=rattler_build.PlatformConfig(target_platform=platform))
    known = rattler_build.VariantConfig({name: list(values) for name, values in chosen.items()})
    try:
        return rattler_build.Stage0Recipe.from_file(path).render(known, target)
    except rattler_build.RattlerBuildError as error:
        raise BundleError(f"{path}: {error}") from None


def _metapackages(where: Folders, chosen: Variants) -> Path:
    """The top-level meta.yaml as a recipe.yaml in the work folder: a list of packages and what each requires.

    Raises BundleError for a key that no metapackage needs.
    """
    path, folder = where.tree / "meta.yaml", where.work / "metapackages"
    pinned = "${{{{ pin_subpackage('{}', exact=true) }}}}".format
    words: dict[str, Any] = {name: f"${{{{ {name} }}}}" for name in chosen}
    words["pin_subpackage"] = lambda name, exact: pinned(name)
    words["compiler"] = "${{{{ compiler('{}') }}}}".format
    document = yaml.safe_load(jinja2.Template(path.read_text(), undefined=jinja2.StrictUndefined).render(words))
    shutil.rmtree(folder, ignore_errors=True)
    outputs = []
    for output in document["outputs"]:
        test = output.pop("test")
        files, needs = test.pop("files", []), test.pop("requires", [])
        outputs.append(
            {
                "package": {"name": output.pop("name"), "version": str(document["package"]["version"])},
                "build": {"noarch": output.pop("build").pop("noarch")},
                "requirements": {"run": output.pop("requirements").pop("run")},
                "tests": [
                    {
                        "script": ["set -e", *test.pop("commands")],
                        "files": {"recipe": files},
                        "requirements": {"run": needs},
                    }
                ],
                "about": output.pop("about"),
            }
        )
        if unknown := [*output, *test]:
            raise BundleError(f"{path}: {outputs[-1]['package']['name']}: no metapackage needs {', '.join(unknown)}")
        for name in ("LICENSE", *files):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(where.tree / name, folder / name)
    named = {"name": document["package"]["name"], "version": str(document["package"]["version"])}
    (folder / "recipe.yaml").write_text(json.dumps({"schema_version": 1, "recipe": named, "outputs": outputs}))
    return folder / "recipe.yaml"


def _names(*lists: Iterable[object]) -> frozenset[str]:
    """The names in requirements. Each is text, or one of the builder's pins."""
    found = set()
    for item in (item for one in lists for item in one):
        if isinstance(item, dict):
            (item,) = (pin["name"] if isinstance(pin, dict) else pin for pin in item.values())
        found.add(str(item).split()[0].lower())
    return frozenset(found)


def digest(*parts: object) -> str:
    """A checksum of plain data."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
