"""Selectors (`# [linux and not aarch64]` at the end of a line), from conda-build's form to rattler-build's."""

from __future__ import annotations

import ast
from collections.abc import Collection

PLATFORMS = ("linux", "osx", "win", "unix", "x86_64", "aarch64", "arm64", "ppc64le")
_OPERATORS = {ast.Eq: "==", ast.NotEq: "!="}


def translate(selector: str, names: Collection[str]) -> str:
    """The condition for rattler-build; `names` are the variants'. Raises ValueError that says what was not understood.

    Understood are platforms, variants compared with strings, `not`, `and`, `or`.
    """
    try:
        tree = ast.parse(selector.strip(), mode="eval")
    except SyntaxError:
        raise ValueError(f"selector [{selector}] is no expression") from None
    return _write(tree.body, selector, names)


def _write(node: ast.expr, selector: str, names: Collection[str]) -> str:
    match node:
        case ast.Name(id=name):
            if name not in PLATFORMS:
                raise ValueError(f"selector [{selector}]: {name!r} is no platform; there are {', '.join(PLATFORMS)}")
            return name
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"not ({_write(operand, selector, names)})"
        case ast.BoolOp(op=op, values=values):
            word = " and " if isinstance(op, ast.And) else " or "
            return word.join(f"({_write(value, selector, names)})" for value in values)
        case ast.Compare(left=ast.Name(id=name), ops=[op], comparators=[ast.Constant(value=str() as value)]) if (
            type(op) in _OPERATORS
        ):
            if name not in names:
                raise ValueError(f"selector [{selector}]: {name!r} is no variant; there are {', '.join(sorted(names))}")
            return f'{name} {_OPERATORS[type(op)]} "{value}"'
    raise ValueError(f"selector [{selector}] is not in the subset that recipes here are written in")
