"""Flags of LMS's own for a user's script: `--lms`, `--lms-limit`, ... and the session that they ask for."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from lms.options import DEFAULT_FRAC, add_flags, from_flags, given_flags, spelled

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from lms.torch.session import Session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--lms` and `--lms-limit`, `--lms-frac`, ... to a script's own parser; `from_args` reads them."""
    group = parser.add_argument_group(
        "large model support",
        "Swap tensors that are saved for the backward pass out of the device's memory. "
        "An option that is not given is taken from the environment variable in brackets. "
        f"Without a limit, a frac or a budget the frac is {DEFAULT_FRAC}.",
    )
    group.add_argument("--lms", action="store_true", help="train with large model support")
    add_flags(group, prefix="--lms-")


def from_args(
    args: argparse.Namespace,
    model: Module | Sequence[Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
) -> AbstractContextManager[Session | None]:
    """The session that `add_arguments`' flags ask for, to be entered; without `--lms` a context that does nothing.

    Warns of flags that have no effect because `--lms` is missing. Raises as `Options.parse`.
    """
    if not args.lms:
        idle = [spelled(name, "--lms-") for name in given_flags(args, "--lms-")]
        if idle:
            warnings.warn(f"{', '.join(idle)}: without effect, because --lms is not given", stacklevel=2)
        return nullcontext()
    from lms.torch.session import LMS  # here, because PyTorch takes a second and most who import this need none

    return LMS(model, optimizer, **from_flags(args, "--lms-").keywords())  # type: ignore[arg-type]
