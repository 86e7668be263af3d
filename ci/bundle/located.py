"""A recipe's text as a tree in which each part knows its line, so that an error can name it.

conda-build fills in a recipe's Jinja first and reads the result as YAML. Here an expression becomes rattler-build's
`${{ ... }}` in its place, and nothing moves: line 7 of the tree is line 7 of the file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from bundle import expression, selector
from bundle.errors import RecipeError

_SET = re.compile(r"\{%-?\s*set\s+(\w+)\s*=\s*(.*?)\s*-?%\}\s*(?:#.*)?$")
_EXPRESSION = re.compile(r"\{\{(.*?)\}\}")
_SELECTOR = re.compile(r"#\s*\[([^\[\]]+)\]\s*$")
# What conda-build would take for a selector, too: brackets that end a line, or that stand anywhere in its comment.
_TAKEN_FOR_ONE = re.compile(r"\[[^\[\]]+\]\s*$|\s#.*\[[^\[\]]+\]")


@dataclass(frozen=True)
class Text:
    """A scalar. `plain` is whether it stood without quotes, so that YAML's numbers and truths can be told from text."""

    value: str
    line: int
    plain: bool = True
    condition: str | None = None  # of the selector on its line


@dataclass(frozen=True)
class List:
    """A block list."""

    items: tuple[Text | List | Map, ...]
    line: int


@dataclass(frozen=True)
class Map:
    """A mapping, in the order of the file."""

    entries: dict[str, Text | List | Map]
    line: int
    lines: dict[str, int] = field(default_factory=dict)  # of the keys


Node = Text | List | Map


@dataclass(frozen=True)
class Document:
    """A file: what it sets, in order, and its tree. Both are in rattler-build's Jinja."""

    path: Path
    context: dict[str, str]
    root: Map


def read(path: Path, variants: Collection[str]) -> Document:
    """The recipe at `path`; `variants` are the names that conda_build_config.yaml defines. Raises RecipeError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise RecipeError(path, 0, f"cannot be read: {error.strerror}") from None
    context: dict[str, str] = {}
    conditions: dict[int, str] = {}
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            lines.append(_line(line, number, variants, context, conditions))
        except ValueError as error:
            raise RecipeError(path, number, str(error)) from None
    try:
        root = yaml.compose("\n".join(lines), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise RecipeError.of_yaml(path, error) from None
    if not isinstance(root, yaml.MappingNode):
        raise RecipeError(path, 1, "expected a mapping with package:, build:, requirements: ...")
    tree = _tree(root, path, conditions)
    assert isinstance(tree, Map)
    used = {node.line for node in _scalars(tree) if node.condition is not None}
    for number in sorted(set(conditions) - used):
        raise RecipeError(path, number, "a selector is understood on an item of a list and on build/skip only")
    return Document(path, context, tree)


def _line(
    line: str, number: int, variants: Collection[str], context: dict[str, str], conditions: dict[int, str]
) -> str:
    """The line with rattler-build's expressions. What it sets and its selector go to `context` and `conditions`."""
    if line.lstrip().startswith("#"):
        return ""
    names = {*variants, *context}
    if "{%" in line:
        found = _SET.match(line.strip())
        if found is None:
            raise ValueError(
                "of Jinja's statements only `{% set NAME = EXPRESSION %}` on a line of its own is understood"
            )
        name, value = found.groups()
        if name in names:
            raise ValueError(f"{name!r} is set already, or a variant")
        if "python" in variants and name.startswith("python"):
            # conda-build finds the variants that a recipe uses by patterns, and that of python has no end of a word.
            raise ValueError(f"{name!r} begins with python: conda-build takes each use of it for one of that variant")
        translated = expression.translate(value, names)
        constant = expression.constant(value)
        context[name] = "${{ " + translated + " }}" if constant is None else constant
        return ""
    if found := _SELECTOR.search(line):
        conditions[number] = selector.translate(found[1], variants)
        line = line[: found.start()].rstrip()
    if _TAKEN_FOR_ONE.search(line):
        raise ValueError(
            "conda-build takes brackets at the end of a line for a selector, and drops it: write a block list"
        )
    line = _EXPRESSION.sub(lambda match: "${{ " + expression.translate(match[1].strip(), names) + " }}", line)
    if "{{" in line.replace("${{", "") or "{#" in line:
        raise ValueError("a Jinja expression must begin and end on one line")
    return line


def _tree(node: yaml.Node, path: Path, conditions: dict[int, str]) -> Node:
    line = node.start_mark.line + 1
    if isinstance(node, yaml.ScalarNode):
        return Text(node.value, line, node.style is None, conditions.get(line))
    assert isinstance(node, yaml.CollectionNode)
    if node.flow_style:
        raise RecipeError(path, line, "lists and mappings are written in block form, an item a line")
    if isinstance(node, yaml.SequenceNode):
        return List(tuple(_tree(item, path, conditions) for item in node.value), line)
    entries: dict[str, Node] = {}
    lines: dict[str, int] = {}
    for key, value in node.value:
        at = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise RecipeError(path, at, "a key must be a word")
        if key.value in entries:
            raise RecipeError(
                path, at, f"{key.value!r} stands here for the second time (first in line {lines[key.value]})"
            )
        lines[key.value] = at
        entries[key.value] = _tree(value, path, conditions)
    return Map(entries, line, lines)


def _scalars(node: Node) -> Iterator[Text]:
    match node:
        case Text():
            yield node
        case List(items=parts):
            for part in parts:
                yield from _scalars(part)
        case Map(entries=entries):
            for part in entries.values():
                yield from _scalars(part)
