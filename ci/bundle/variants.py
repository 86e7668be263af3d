"""conda_build_config.yaml: which variants there are, and what each is."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

import yaml

from bundle.errors import RecipeError

# Those that conda-build looks up by itself, whether a recipe names them or not.
_IMPLICIT = re.compile(r"python|[a-z]+_compiler(_version)?|c_stdlib(_version)?")


def read(path: Path) -> dict[str, list[str]]:
    """The values of each variant, in the order of the file. Raises RecipeError.

    Every value is text: an unquoted 3.10 would be the number 3.1.
    """
    try:
        root = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    except OSError as error:
        raise RecipeError(path, 0, f"cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        raise RecipeError.of_yaml(path, error) from None
    if not isinstance(root, yaml.MappingNode):
        raise RecipeError(path, 1, "expected variants, each a name with a block list of values")
    found: dict[str, list[str]] = {}
    for key, value in root.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in found:
            raise RecipeError(path, line, f"{name!r} stands here for the second time")
        if not isinstance(value, yaml.SequenceNode) or value.flow_style or not value.value:
            raise RecipeError(
                path, line, f"{name}: expected a block list of values; conda-build drops a list in brackets"
            )
        found[name] = []
        for item in value.value:
            at = item.start_mark.line + 1
            if not isinstance(item, yaml.ScalarNode) or item.tag != "tag:yaml.org,2002:str":
                raise RecipeError(path, at, f"{name}: expected text, found {item.value!r}: put it in quotes")
            found[name].append(item.value)
    return found


def restricted(variants: Mapping[str, list[str]], name: str, values: list[str]) -> dict[str, list[str]]:
    """`variants` with only those values of `name` that are among `values`, in their order."""
    return {key: [one for one in all_ if key != name or one in values] for key, all_ in variants.items()}


def refuse_unused(path: Path, used: Collection[str]) -> None:
    """Raises RecipeError for a variant of the file `path` that no recipe uses: a misspelt one would change nothing."""
    for name in read(path):
        if name not in used and not _IMPLICIT.fullmatch(name):
            (line,) = [at for at, text in enumerate(path.read_text().splitlines(), 1) if text.startswith(f"{name}:")]
            raise RecipeError(
                path, line, f"no recipe uses the variant {name!r}; those used are {', '.join(sorted(used))}"
            )
