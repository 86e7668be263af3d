"""Parameters of a search: as they are written, as Optuna's distributions, and on a script's command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lms.errors import UsageError
from lms.target import Target

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

KINDS = ("uniform", "loguniform", "int", "logint", "choice")
FORMS = (
    "lr=loguniform:1e-5:1e-1 or dropout=uniform:0:0.5 (numbers), width=int:16:512 or batch=logint:1:64 (whole "
    "numbers), optimizer=choice:sgd,adam (words)"
)


@dataclass(frozen=True)
class Parameter:
    """What `--param` says: a name, and its range as it was written (`text`) and as Optuna has it."""

    name: str
    text: str
    distribution: BaseDistribution

    @classmethod
    def parse(cls, text: str) -> Parameter:
        """The parameter that `text` describes. Raises UsageError that shows every form."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        name, equals, rest = text.partition("=")
        kind, _, values = rest.partition(":")
        if not equals or not name.strip("-") or kind not in KINDS:
            raise _refused(text, f"expected NAME=KIND:VALUES with a kind of {', '.join(KINDS)}")
        name = name.strip("-")
        if kind == "choice":
            choices = values.split(",")
            if len(set(choices)) < len(choices) or "" in choices:
                raise _refused(text, "expected choices that differ, separated by commas")
            return cls(name, rest, CategoricalDistribution(choices))
        number, noun = (int, "whole numbers") if kind.endswith("int") else (float, "numbers")
        try:
            low, high = (number(value) for value in values.split(":"))
        except ValueError:
            raise _refused(text, f"expected {kind}:LOW:HIGH, two {noun}") from None
        if not 0 < high - low < float("inf"):  # NaN fails this too
            raise _refused(text, f"expected a finite range that ends above {low}")
        log = kind.startswith("log")
        if log and low <= 0:
            raise _refused(text, "a logarithmic range begins above 0")
        if number is int:
            return cls(name, rest, IntDistribution(int(low), int(high), log=log))
        return cls(name, rest, FloatDistribution(low, high, log=log))


def _refused(text: str, why: str) -> UsageError:
    return UsageError(f"--param={text!r}: {why}; such as {FORMS}")


def parse_all(texts: Sequence[str]) -> tuple[Parameter, ...]:
    """The parameters in the order given. Raises UsageError, also if two have one name."""
    parameters = tuple(Parameter.parse(text) for text in texts)
    names = [one.name for one in parameters]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--param: {twice[0]!r} is given twice; expected each name once")
    return parameters


def command_line(target: Target, values: Mapping[str, object]) -> list[str]:
    """A script and its arguments, with the parameters' values.

    A value goes where an argument holds `{NAME}`. If none does, `--NAME=VALUE` comes last.
    """
    filled = list(target.args)
    for name, value in values.items():
        mark = "{" + name + "}"
        if any(mark in word for word in target.args):
            filled = [word.replace(mark, str(value)) for word in filled]
        else:
            # One word: argparse takes a second word such as -1e-05 for an option.
            filled.append(f"--{name}={value}")
    return replace(target, args=tuple(filled)).words
