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
class Recipe:
    """A recipe with copies of all that it is made from, on which later changes of the tree have no influence.

    Plain data, which another process can be handed; what the builder makes of it cannot.
    """

    path: Path  # its meta.yaml, for messages
    folder: Path  # the copy of its folder
    document: dict[str, rendering.Value]  # whose sources are copies
    variants: Mapping[str, list[str]]  # of conda_build_config.yaml
    content: str  # a checksum of what was copied

    def outputs(self, folder: Path, platform: str) -> list[rattler_build.RenderedVariant]:
        """All variants of all packages that it makes, when it is built in `folder`. Raises RecipeError."""
        target = rattler_build.RenderConfig(platform=rattler_build.PlatformConfig(target_platform=platform))
        try:
            stage0 = rattler_build.Stage0Recipe.from_dict(self.document, recipe_dir=folder)
            return stage0.render(rattler_build.VariantConfig(dict(self.variants)), target)
        except rattler_build.RattlerBuildError as error:
            raise RecipeError(self.path, 1, f"rattler-build refuses it: {error}") from None


@dataclass(frozen=True)
class Rendered:
    """One variant of one package, with the recipe that makes it."""

    recipe: Recipe
    package: plan.Package


def render(where: Folders, base: Base, platform: str) -> list[Rendered]:
    """All variants of all recipes that can be built on `base`. Copies what they are made from. Raises RecipeError."""
    known = restricted(where, base)
    found: list[Rendered] = []
    used: set[str] = set()
    for path in where.recipes():
        other = path.with_name("conda_build_config.yaml")
        if other.exists() and not where.is_bundle(path):
            raise RecipeError(other, 1, f"is not read: the variants of all recipes are in {where.variants}")
        recipe = _copied(where, path, known)
        for output in recipe.outputs(recipe.folder, platform):
            package = _package(output, recipe, platform)
            if not output.recipe.to_dict().get("tests"):
                raise RecipeError(
                    path, 1, f"{package.name} has no tests, and would count as tested: give it test/commands, at least"
                )
            found.append(Rendered(recipe, package))
            used.update(output.variant)
    variants.refuse_unused(where.variants, used)
    return found


def again(recipe: Recipe, file: str, folder: Path, platform: str) -> rattler_build.RenderedVariant:
    """The variant whose package is `file`, to be built in `folder`, which is made: a copy of the recipe's."""
    shutil.copytree(recipe.folder, folder, symlinks=True)
    outputs = recipe.outputs(folder, platform)
    (found,) = [one for one in outputs if _package(one, recipe, platform).file == file]
    return found


def restricted(where: Folders, base: Base) -> Mapping[str, list[str]]:
    """The variants that are asked for, of which Pythons only those that `base` has. Raises RecipeError: it has none."""
    known = variants.read(where.variants)
    if where.mpi is not None:
        if where.mpi not in known.get("mpi", ()):
            there = ", ".join(known.get("mpi", ())) or "none"
            raise RecipeError(where.variants, 1, f"mpi: there is no {where.mpi}; there are: {there}")
        known = variants.restricted(known, "mpi", [where.mpi])
    if base.pythons is None:
        return known
    known = variants.restricted(known, "python", base.pythons)
    if not known["python"]:
        raise RecipeError(where.variants, 1, f"python: none of them is in {base.name}, which has {base.pythons}")
    return known


def _copied(where: Folders, path: Path, known: Mapping[str, list[str]]) -> Recipe:
    """The recipe at `path`, with copies of what it is made from in the work folder."""
    document = rendering.render(path, known)
    is_bundle = where.is_bundle(path)
    name = "bundle" if is_bundle else path.parent.name
    folder, sources = where.work / "recipes" / name, where.work / "sources" / name
    content = _stage(document, path, folder, sources, whole_tree=is_bundle)
    return Recipe(path, folder, document, known, content)


def _stage(document: dict[str, rendering.Value], path: Path, recipe: Path, sources: Path, *, whole_tree: bool) -> str:
    """A copy of the recipe and of its sources for the builder, which writes beside both; a checksum of them."""
    parts: list[str] = []
    if whole_tree:  # around the recipe, of which the builder needs nothing else
        shutil.rmtree(recipe, ignore_errors=True)
        recipe.mkdir(parents=True)
        for name in ("LICENSE", *_tested_with(document)):
            if not (path.parent / name).is_file():
                raise RecipeError(path, 1, f"test/files: there is no {path.parent / name}")
            (recipe / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path.parent / name, recipe / name)
            parts.append(folders.checksum_of(recipe / name))
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


def _tested_with(document: dict[str, rendering.Value]) -> list[str]:
    """The files that the tests of a recipe's outputs name, each once."""
    found: list[str] = []
    outputs = document.get("outputs", [])
    assert isinstance(outputs, list)
    for output in outputs:
        assert isinstance(output, dict)
        tests = output.get("tests", [])
        assert isinstance(tests, list)
        for test in tests:
            files = test.get("files") if isinstance(test, dict) else None
            named = files.get("recipe") if isinstance(files, dict) else None
            found += [str(name) for name in named] if isinstance(named, list) else []
    return list(dict.fromkeys(found))


def _license(document: dict[str, rendering.Value]) -> str | None:
    """A licence from outside the recipe's folder, which the builder does not take; conda-build does."""
    about = document.get("about")
    named = about.get("license_file") if isinstance(about, dict) else None
    return named if isinstance(named, str) and named.startswith("..") else None


def _package(output: rattler_build.RenderedVariant, recipe: Recipe, platform: str) -> plan.Package:
    made = output.recipe
    document = made.to_dict()
    needs = document.get("requirements", {})
    tests = [test.get("requirements", {}) for test in document.get("tests", [])]

    def names(*lists: Sequence[object]) -> tuple[str, ...]:
        found = {_name(item) for one in lists for item in one}
        return tuple(sorted(found - {""}))

    # Where the copy of the sources lies is of no account; what is in them is in the recipe's checksum.
    said = {key: value for key, value in document.items() if key != "source"}
    content = json.dumps([said, output.variant, recipe.content], sort_keys=True, default=str)
    return plan.Package(
        name=made.package.name,
        version=made.package.version,
        build=str(made.build.string),
        subdir="noarch" if made.build.noarch else platform,
        builds_with=names(needs.get("build", []), needs.get("host", [])),
        runs_with=names(needs.get("run", [])),
        tests_with=names(*(test.get("run", []) for test in tests)),
        content=hashlib.sha256(content.encode()).hexdigest(),
        variant={key: str(value) for key, value in output.variant.items() if key in recipe.variants},
    )


def _name(requirement: object) -> str:
    """The name in a requirement, which is text or one of the builder's pins."""
    if isinstance(requirement, dict):
        inner = next(iter(requirement.values()))
        return str(inner.get("name", "")) if isinstance(inner, dict) else str(inner)
    return str(requirement).split()[0].lower() if str(requirement) else ""
