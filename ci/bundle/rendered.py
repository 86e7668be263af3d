"""All recipes as the builder takes them: rendered, variant by variant, from copies of their sources."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import rattler_build

from bundle import folders, plan, rendering, variants
from bundle.base import Base
from bundle.errors import RecipeError
from bundle.folders import Folders


@dataclass(frozen=True)
class Rendered:
    """One variant of one package."""

    recipe: Path  # its meta.yaml
    package: plan.Package
    variant: rattler_build.RenderedVariant


def render(where: Folders, base: Base, platform: str) -> list[Rendered]:
    """All variants of all recipes that can be built on `base`. Copies what they are made from. Raises RecipeError."""
    known = restricted(where, base)
    found: list[Rendered] = []
    used: set[str] = set()
    for path in where.recipes():
        other = path.with_name("conda_build_config.yaml")
        if other.exists() and not where.is_bundle(path):
            raise RecipeError(other, 1, f"is not read: the variants of all recipes are in {where.variants}")
        document = rendering.render(path, known)
        recipe, sources = _places(where, path)
        content = _stage(document, path, recipe, sources, whole_tree=where.is_bundle(path))
        variants_ = _variants(document, path, recipe, known, platform)
        found += [Rendered(path, _package(variant, content, platform), variant) for variant in variants_]
        used.update(*(variant.variant for variant in variants_))
    variants.refuse_unused(where.variants, used)
    return found


def again(
    where: Folders, base: Base, platform: str, path: Path, file: str, recipe: Path
) -> rattler_build.RenderedVariant:
    """The variant of `path` whose package is `file`, from what `render` has copied, with the recipe's copy in `recipe`.

    For another process, which cannot be handed the one that `render` gave.
    """
    known = restricted(where, base)
    document = rendering.render(path, known)
    staged, sources = _places(where, path)
    shutil.copytree(staged, recipe, symlinks=True)
    _point(document, path, sources)
    for variant in _variants(document, path, recipe, known, platform):
        if _package(variant, "", platform).file == file:
            return variant
    raise RecipeError(path, 1, f"it makes no {file} any more: it was changed while it was built; run this again")


def restricted(where: Folders, base: Base) -> Mapping[str, list[str]]:
    """The variants that are asked for, of which Pythons only those that `base` has. Raises RecipeError: it has none."""
    known = variants.read(where.variants)
    if where.mpi is not None:
        known = variants.restricted(known, "mpi", [where.mpi])
    if base.pythons is None:
        return known
    known = variants.restricted(known, "python", base.pythons)
    if not known["python"]:
        raise RecipeError(where.variants, 1, f"python: none of them is in {base.name}, which has {base.pythons}")
    return known


def _places(where: Folders, path: Path) -> tuple[Path, Path]:
    """Where the copies of a recipe and of its sources lie."""
    name = "bundle" if where.is_bundle(path) else path.parent.name
    return where.work / "recipes" / name, where.work / "sources" / name


def _variants(
    document: dict[str, rendering.Value], path: Path, recipe: Path, known: Mapping[str, list[str]], platform: str
) -> list[rattler_build.RenderedVariant]:
    target = rattler_build.RenderConfig(platform=rattler_build.PlatformConfig(target_platform=platform))
    try:
        stage0 = rattler_build.Stage0Recipe.from_dict(document, recipe_dir=recipe)
        return stage0.render(rattler_build.VariantConfig(dict(known)), target)
    except rattler_build.RattlerBuildError as error:
        raise RecipeError(path, 1, f"rattler-build refuses it: {error}") from None


def _stage(document: dict[str, rendering.Value], path: Path, recipe: Path, sources: Path, *, whole_tree: bool) -> str:
    """A copy of the recipe and of its sources for the builder, which writes beside both; a checksum of them."""
    parts: list[str] = []
    if whole_tree:  # around the recipe, of which the builder needs nothing else
        shutil.rmtree(recipe, ignore_errors=True)
        recipe.mkdir(parents=True)
        shutil.copy2(path.parent / "LICENSE", recipe / "LICENSE")
        parts.append(folders.checksum_of(recipe / "LICENSE"))
    else:
        folders.copy(path.parent, recipe)
        parts.append(folders.checksum(path.parent))
    license_file = _license(document)
    if license_file is not None:
        shutil.copy2((path.parent / license_file).resolve(), recipe / "LICENSE")
        parts.append(folders.checksum_of(recipe / "LICENSE"))
    shutil.rmtree(sources, ignore_errors=True)
    for origin, copy in _point(document, path, sources):
        if origin.is_dir():
            folders.copy(origin, copy)
            parts.append(folders.checksum(origin))
        elif origin.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(origin, copy)
            parts.append(folders.checksum_of(origin))
        else:
            raise RecipeError(path, 1, f"source/path: there is no {origin}")
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _point(document: dict[str, rendering.Value], path: Path, sources: Path) -> list[tuple[Path, Path]]:
    """Let `document` name the copies in `sources`, and the copied licence; what is to be copied, and to where."""
    pairs: list[tuple[Path, Path]] = []
    named = document.get("source", [])
    assert isinstance(named, list)
    for number, source in enumerate(named):
        assert isinstance(source, dict)
        origin = (path.parent / str(source["path"])).resolve()
        pairs.append((origin, sources / str(number) / origin.name))
        source["path"] = str(pairs[-1][1])
    if _license(document) is not None:
        about = document["about"]
        assert isinstance(about, dict)
        about["license_file"] = "LICENSE"
    return pairs


def _license(document: dict[str, rendering.Value]) -> str | None:
    """A licence from outside the recipe's folder, which the builder does not take; conda-build does."""
    about = document.get("about")
    named = about.get("license_file") if isinstance(about, dict) else None
    return named if isinstance(named, str) and named.startswith("..") else None


def _package(variant: rattler_build.RenderedVariant, sources: str, platform: str) -> plan.Package:
    recipe = variant.recipe
    document = recipe.to_dict()
    needs = document.get("requirements", {})
    tests = [test.get("requirements", {}) for test in document.get("tests", [])]

    def names(*lists: Sequence[object]) -> tuple[str, ...]:
        found = {_name(item) for one in lists for item in one}
        return tuple(sorted(found - {""}))

    # Where the copy of the sources lies is of no account; what is in them is in `sources`.
    said = {key: value for key, value in document.items() if key != "source"}
    content = json.dumps([said, variant.variant, sources], sort_keys=True, default=str)
    return plan.Package(
        name=recipe.package.name,
        version=recipe.package.version,
        build=str(recipe.build.string),
        subdir="noarch" if recipe.build.noarch else platform,
        builds_with=names(needs.get("build", []), needs.get("host", [])),
        runs_with=names(needs.get("run", [])),
        tests_with=names(*(test.get("run", []) for test in tests)),
        content=hashlib.sha256(content.encode()).hexdigest(),
    )


def _name(requirement: object) -> str:
    """The name in a requirement, which is text or one of the builder's pins."""
    if isinstance(requirement, dict):
        inner = next(iter(requirement.values()))
        return str(inner.get("name", "")) if isinstance(inner, dict) else str(inner)
    return str(requirement).split()[0].lower() if str(requirement) else ""
