"""envs/*.yaml: what `conda env create -f` reads, and nothing beyond it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml
from packaging.requirements import InvalidRequirement, Requirement

from bundle.errors import RecipeError

_KEYS = ("name", "channels", "dependencies")


@dataclass(frozen=True)
class Environment:
    """An environment that is asked for."""

    path: Path
    name: str
    channels: tuple[str, ...]
    specs: tuple[str, ...]  # of conda
    pip: tuple[str, ...]  # of the user's own pip step

    def of_conda(self, *, with_pip: bool) -> list[str]:
        """What is asked of conda; without pip itself where only the pip step needs it, which is left out."""
        return [spec for spec in self.specs if with_pip or not (spec == "pip" and self.pip)]


def read(path: Path) -> Environment:
    """The environment that the file describes. Raises RecipeError with file and line for what is not understood."""
    try:
        root = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    except OSError as error:
        others = ", ".join(sorted(one.stem for one in path.parent.glob("*.yaml"))) or "none"
        raise RecipeError(path, 0, f"cannot be read ({error.strerror}); there are {others}") from None
    except yaml.MarkedYAMLError as error:
        raise RecipeError.of_yaml(path, error) from None
    if not isinstance(root, yaml.MappingNode):
        raise RecipeError(path, 1, f"expected {', '.join(_KEYS)}")
    found = {}
    for key, value in root.value:
        if key.value not in _KEYS:
            raise RecipeError(
                path, key.start_mark.line + 1, f"{key.value!r} is no key here; there are {', '.join(_KEYS)}"
            )
        found[key.value] = value
    if missing := [key for key in _KEYS if key not in found]:
        raise RecipeError(path, 1, f"{', '.join(missing)}: missing")
    specs: list[str] = []
    pip: list[str] = []
    for item in _items(path, found["dependencies"], "dependencies"):
        if isinstance(item, yaml.ScalarNode):
            specs.append(item.value)
        elif isinstance(item, yaml.MappingNode) and [key.value for key, _ in item.value] == ["pip"]:
            pip += [_requirement(path, one) for one in _items(path, item.value[0][1], "pip")]
        else:
            raise RecipeError(
                path, item.start_mark.line + 1, "dependencies: expected a package, or one mapping with pip:"
            )
    channels = tuple(str(item.value) for item in _items(path, found["channels"], "channels"))
    return Environment(path, str(found["name"].value), channels, tuple(specs), tuple(pip))


def _requirement(path: Path, item: yaml.Node) -> str:
    """A line of the pip step: nothing that pip would read elsewhere, so that it is known before what it brings."""
    try:
        Requirement(str(item.value))
    except InvalidRequirement as error:
        raise RecipeError(
            path, item.start_mark.line + 1, f"pip: expected a package's name, with its version or not, found "
            f"{str(item.value)!r} ({str(error).splitlines()[0]}); leave pip's options to PIP_* in the environment",
        ) from None  # fmt: skip
    return str(item.value)


def _items(path: Path, node: yaml.Node, key: str) -> list[yaml.Node]:
    if not isinstance(node, yaml.SequenceNode):
        raise RecipeError(path, node.start_mark.line + 1, f"{key}: expected a list")
    return list(node.value)
