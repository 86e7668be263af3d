"""Expressions of a recipe's Jinja, from conda-build's names to rattler-build's.

Only what the recipes need is understood: names, constants, `+ - ~ == !=`, `A if B else C`, and four functions. All else
is an error, because whatever passed through unchanged would mean something else, or nothing, to the other builder.
Sources: conda-build's documentation ("Defining metadata", "Build variants") and rattler-build's ("Jinja").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

import jinja2
from jinja2 import nodes

# Names that conda-build defines, as rattler-build writes them.
BUILT_IN = {
    "CONDA_PY": "python | version_to_buildstring",
    "PKG_HASH": "hash",
    "PYTHON": "PYTHON",
}
# Functions, with their keyword arguments as rattler-build names them.
FUNCTIONS = {
    "compiler": {},
    "stdlib": {},
    "pin_compatible": {"min_pin": "lower_bound", "max_pin": "upper_bound", "exact": "exact"},
    "pin_subpackage": {"min_pin": "lower_bound", "max_pin": "upper_bound", "exact": "exact"},
}
_OPERATORS = {nodes.Add: "+", nodes.Sub: "-"}
_COMPARISONS = {"eq": "==", "ne": "!="}
_ENVIRONMENT = jinja2.Environment(autoescape=False)


def translate(expression: str, names: Collection[str]) -> str:
    """`expression` (what stands between the braces) for rattler-build; `names` are the recipe's own and the variants'.

    Raises ValueError that says what was not understood.
    """
    try:
        template = _ENVIRONMENT.parse("{{ " + expression + " }}")  # "{{-" would be another mark
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{{{{{expression}}}}} is no Jinja expression: {error.message}") from None
    match template.body:
        case [nodes.Output(nodes=[nodes.Expr() as tree])]:
            return _write(tree, names)
    raise ValueError(f"{{{{{expression}}}}}: expected one expression")


def constant(expression: str) -> str | None:
    """The text that `expression` stands for, where it is nothing but a string."""
    found = re.fullmatch(r"""\s*(["'])([^"'\\]*)\1\s*""", expression)
    return found[2] if found else None


def _write(node: nodes.Expr, names: Collection[str]) -> str:
    def inner(part: nodes.Node | None) -> str:
        if not isinstance(part, nodes.Expr):
            raise ValueError("expected `A if B else C`, found no else")
        return _write(part, names)

    def operand(part: nodes.Node | None) -> str:
        # The tree has no parentheses any more, and the other builder's operators may bind otherwise.
        written = inner(part)
        return written if isinstance(part, nodes.Const | nodes.Call) or written.isidentifier() else f"({written})"

    match node:
        case nodes.Name(name=name):
            return _name(name, names)
        case nodes.Const(value=bool() as value):
            return str(value).lower()
        case nodes.Const(value=str() as value):
            if '"' in value or "\\" in value:
                raise ValueError(f"{value!r}: a string with quotes or backslashes is not understood")
            return f'"{value}"'
        case nodes.Const(value=int() | float() as value):
            return repr(value)
        case nodes.Add() | nodes.Sub():
            return f"{operand(node.left)} {_OPERATORS[type(node)]} {operand(node.right)}"
        case nodes.Concat(nodes=parts):
            return " ~ ".join(map(operand, parts))
        case nodes.Compare(expr=left, ops=[nodes.Operand(op=op, expr=right)]) if op in _COMPARISONS:
            return f"{operand(left)} {_COMPARISONS[op]} {operand(right)}"
        case nodes.CondExpr(test=test, expr1=then, expr2=other):
            return f"{operand(then)} if {operand(test)} else {operand(other)}"
        case nodes.Call(node=nodes.Name(name=function)):
            return _call(node, function, inner)
    raise ValueError(f"{type(node).__name__.lower()} is not in the subset of Jinja that recipes here are written in")


def _name(name: str, names: Collection[str]) -> str:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name in names:
        return name
    if name in FUNCTIONS:
        raise ValueError(f"{name} is a function: {name}(...)")
    known = ", ".join(sorted({*names, *BUILT_IN}))
    raise ValueError(f"{name!r} is not defined; there are {known}, and the functions {', '.join(sorted(FUNCTIONS))}")


def _call(node: nodes.Call, function: str, inner: Callable[[nodes.Node | None], str]) -> str:
    if function not in FUNCTIONS:
        raise ValueError(f"function {function!r} is not known; there are {', '.join(sorted(FUNCTIONS))}")
    if node.dyn_args is not None or node.dyn_kwargs is not None or len(node.args) != 1:
        raise ValueError(f"{function}() takes one argument without a name")
    keywords = FUNCTIONS[function]
    words = [inner(node.args[0])]
    for pair in node.kwargs:
        if pair.key not in keywords:
            raise ValueError(f"{function}() has no argument {pair.key!r}; there are {', '.join(keywords) or 'none'}")
        words.append(f"{keywords[pair.key]}={inner(pair.value)}")
    return f"{function}({', '.join(words)})"
