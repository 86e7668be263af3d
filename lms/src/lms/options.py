"""Every option once: its name, help, environment variable, default and how its value is read.

The fields of `Options` are that table. Keyword arguments (`lms.LMS`), flags (`lms run`, `add_arguments`) and
environment variables (`LMS_LIMIT`, ...) are all made from it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypedDict

from lms.errors import UsageError
from lms.units import parse_size

DEFAULT_FRAC = 0.9
_DEFAULT_WHY = f"frac {DEFAULT_FRAC}, the default"
BOUNDS = ("limit", "frac", "budget")  # at most one is given
KINDS = ("activations", "optimizer", "gradients", "parameters")

Reader = Callable[[object, str], object]  # (value as given, the name it was given under) -> value


class NotBuiltError(UsageError, NotImplementedError):
    """A known value of an option that this version does not implement yet."""


_size_or_zero = partial(parse_size, zero=True)


def _share(value: object, name: str) -> float:
    try:
        share = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else -1.0
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:  # NaN fails this too
        raise UsageError(f"{name}={value!r}: expected a share above 0 and at most 1, such as 0.9")
    return share


def _kinds(value: object, name: str) -> tuple[str, ...]:
    named = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [value]
    kinds = tuple(dict.fromkeys(str(kind).strip() for kind in named))
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(f"{name}={value!r}: {kind!r} is unknown; expected any of {', '.join(KINDS)}")
    if not kinds:
        raise UsageError(f"{name}={value!r}: nothing to swap; expected any of {', '.join(KINDS)}")
    return kinds


def _folder(value: object, name: str) -> Path:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise UsageError(f"{name}={value!r}: expected the path of a folder that exists and can be written to")
    folder = Path(os.fspath(value))
    if not os.path.isdir(folder):  # False also for a name that is too long
        found = "it is not a folder" if os.path.exists(folder) else "it does not exist"
        raise UsageError(f"{name}={str(folder)!r}: {found}; expected a folder that can be written to")
    _try_folder(folder, f"{name}={str(folder)!r}", "it")
    return folder


def _try_folder(folder: Path, given: str, which: str) -> None:
    try:
        # Permission bits are not the whole truth (root, read-only mounts, kernel file systems), so try.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"{given}: no file can be made in {which} ({error.strerror}); expected one that can be written to"
        ) from None


def _count(value: object, name: str) -> int:
    try:
        count = int(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else -1
    except ValueError:
        count = -1
    if count < 0:
        raise UsageError(f"{name}={value!r}: expected a whole number, zero or more")
    return count


def _port(value: object, name: str) -> int:
    try:
        port = int(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else 0
    except ValueError:
        port = 0
    if not 1 <= port <= 65535:
        raise UsageError(f"{name}={value!r}: expected the number of a TCP port, 1 to 65535, such as 9117")
    return port


def _address(value: object, name: str) -> str:
    try:
        return str(ip_address(value if isinstance(value, str) else ""))
    except ValueError:
        raise UsageError(
            f"{name}={value!r}: expected an IP address of this host, such as 127.0.0.1; 0.0.0.0 or :: is all of them"
        ) from None


def new_folder(value: object, name: str) -> Path:
    """The folder that option `name` gives: files can be made in it, or it can be made. Raises UsageError."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise UsageError(f"{name}={value!r}: expected the path of a folder, which is made if it is missing")
    folder = Path(os.fspath(value))
    # os.path.exists is False also for a name that is too long, which the writer then warns of.
    there = next(one for one in (folder, *Path(os.path.abspath(folder)).parents) if os.path.exists(one))
    if not os.path.isdir(there):
        raise UsageError(f"{name}={str(folder)!r}: {str(there)!r} is not a folder; expected one that can be written to")
    _try_folder(there, f"{name}={str(folder)!r}", repr(str(there)))
    return folder


_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _switch(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _SWITCH:
        return _SWITCH[value.strip().lower()]
    raise UsageError(f"{name}={value!r}: expected one of {', '.join(_SWITCH)}")


def _option(default: object, read: Reader, metavar: str, text: str) -> Any:
    return field(default=default, metadata={"read": read, "metavar": metavar, "help": text})


class Given(TypedDict, total=False):
    """The options as keyword arguments, before they are read. None counts as not given."""

    limit: int | str | None
    frac: float | str | None
    budget: int | str | None
    min_size: int | str | None
    swap: Sequence[str] | str | None
    spill_dir: str | os.PathLike[str] | None
    host_limit: int | str | None
    prefetch: int | None
    write_ahead: int | None
    recompute: bool | None
    verify: bool | None
    tensorboard: str | os.PathLike[str] | None
    metrics_port: int | str | None
    metrics_address: str | None


@dataclass(frozen=True)
class Options:
    """The options of a session; sizes in bytes. Exactly one of limit, frac and budget is set after `parse`."""

    limit: int | None = _option(
        None,
        parse_size,
        "SIZE",
        "most memory the device may hold, such as 12GB or 12GiB (GPU: the allocator's allocated bytes; "
        "CPU: the process's resident set)",
    )
    frac: float | None = _option(
        None,
        _share,
        "SHARE",
        "the same as a share of the device's memory, above 0 and at most 1",
    )
    budget: int | None = _option(
        None, _size_or_zero, "SIZE", "instead of a limit: most bytes saved for the backward that may stay; 0 is allowed"
    )
    min_size: int = _option(64_000, _size_or_zero, "SIZE", "tensors smaller than this stay (default 64KB)")
    swap: tuple[str, ...] = _option(
        KINDS[:1],
        _kinds,
        "KINDS",
        f"what may move, separated by commas: {', '.join(KINDS)} (default {KINDS[0]})",
    )
    spill_dir: Path | None = _option(  # noqa: RUF009  # it is a field
        None,
        _folder,
        "DIR",
        "folder of the file tier, on a disk (CPU, when not given: the temporary folder if it is on a disk, else "
        "/var/tmp, the working directory or the home folder; GPU, when not given: no file tier)",
    )
    host_limit: int | None = _option(
        None, parse_size, "SIZE", "GPU: most pinned host memory to use; past it the file tier, or an error"
    )
    prefetch: int | None = _option(
        None,
        _count,
        "N",
        "start copies back at most N accesses ahead of their use (0: at the use); default: the plan's choice",
    )
    write_ahead: int | None = _option(
        None, _count, "N", "let at most N copies out be in flight (0: wait for each); default: the plan's choice"
    )
    recompute: bool = _option(
        False,
        _switch,
        "",
        "also choose modules whose forward runs again in the backward, instead of swapping what they save",
    )
    verify: bool = _option(
        False, _switch, "", "keep a checksum of everything that is swapped and compare it on the way back"
    )
    tensorboard: Path | None = _option(  # noqa: RUF009  # it is a field
        None,
        new_folder,
        "DIR",
        "write the figures to this folder once a second, for TensorBoard; each of several ranks has its own in it",
    )
    metrics_port: int | None = _option(
        None,
        _port,
        "N",
        "serve the figures on this port, for Prometheus: one port a host, for all of its ranks",
    )
    metrics_address: str = _option(
        "127.0.0.1", _address, "IP", "open that port at this address of the host (default 127.0.0.1: this host only)"
    )
    why: str = field(default="", compare=False)  # for people: the source of limit, frac or budget

    @classmethod
    def parse(cls, *, prefix: str = "", environ: Mapping[str, str] | None = None, **given: object) -> Options:
        """Options from keyword arguments, and from environment variables for what is not given (None).

        `prefix` is how the caller's user spells an option: "" for keywords, "--" or "--lms-" for flags; errors name
        the option that way, or by its variable. `environ` is os.environ when None.

        Raises UsageError for a wrong value or for two of limit, frac and budget; TypeError for a keyword that is no
        option.
        """
        table = {option.name: option for option in arguments()}
        if unknown := [name for name in given if name not in table]:
            raise TypeError(f"{unknown[0]!r} is no option of LMS; expected any of {', '.join(table)}")
        environment = os.environ if environ is None else environ
        found = {name: (spelled(name, prefix), value) for name, value in given.items() if value is not None}
        bounded = any(name in found for name in BOUNDS)  # a bound that is given overrules every variable for a bound
        for name in table:
            value = environment.get(variable(name), "")
            if value and name not in found and not (bounded and name in BOUNDS):
                found[name] = (variable(name), value)
        bounds = [name for name in BOUNDS if name in found]
        if len(bounds) > 1:
            names = " and ".join(f"{found[name][0]}={found[name][1]!r}" for name in bounds)
            raise UsageError(f"{names}: give at most one of {', '.join(spelled(name, prefix) for name in BOUNDS)}")
        values = {name: table[name].metadata["read"](value, name_given) for name, (name_given, value) in found.items()}
        if values.get("recompute") and "activations" not in values.get("swap", KINDS[:1]):
            raise UsageError(
                f"{found['recompute'][0]}: has no effect with {found['swap'][0]}={found['swap'][1]!r}: it chooses "
                "between swapping what is saved and recomputing it; add 'activations' to that, or leave it out"
            )
        if bounds:
            name_given = found[bounds[0]][0]
            why = f"from {name_given}" if name_given == variable(bounds[0]) else f"{bounds[0]} given"
        else:
            values["frac"], why = DEFAULT_FRAC, _DEFAULT_WHY
        return cls(**values, why=why)

    @property
    def bounded(self) -> bool:
        """Whether a limit, frac or budget was given; otherwise the default holds."""
        return self.why != _DEFAULT_WHY

    def limit_of(self, capacity: int) -> int | None:
        """The limit in bytes on a device of `capacity` bytes; None under a budget."""
        return int(self.frac * capacity) if self.frac is not None else self.limit

    def keywords(self) -> dict[str, object]:
        """The options as the keyword arguments that `lms.LMS` and `lms.enable` take."""
        return {option.name: getattr(self, option.name) for option in arguments()}


def arguments() -> tuple[Field[object], ...]:
    """The table: one dataclass field for each option, its metadata holding "read", "metavar" and "help"."""
    return tuple(option for option in fields(Options) if option.metadata)


def spelled(name: str, prefix: str) -> str:
    """How a user writes option `name`: as a keyword when `prefix` is empty, as a flag otherwise."""
    return prefix + name.replace("_", "-") if prefix else name


def variable(name: str) -> str:
    """The environment variable of option `name`."""
    return f"LMS_{name.upper()}"


def add_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, prefix: str = "--", names: Sequence[str] | None = None
) -> None:
    """Add a flag for each option (or for those in `names`) to `parser`; values stay text until `Options.parse`."""
    for option in arguments():
        if names is not None and option.name not in names:
            continue
        flag = spelled(option.name, prefix)
        text = option.metadata["help"] + f" [{variable(option.name)}]"
        if option.type == "bool":
            parser.add_argument(flag, action="store_true", default=None, help=text)
        else:
            parser.add_argument(flag, metavar=option.metadata["metavar"], default=None, help=text)


def from_flags(args: argparse.Namespace, prefix: str = "--") -> Options:
    """The options that `add_flags` put into `args`, or else the environment. Raises as `Options.parse`."""
    return Options.parse(prefix=prefix, environ=None, **given_flags(args, prefix))


def given_flags(args: argparse.Namespace, prefix: str) -> dict[str, object]:
    """The options that were given on the command line, by name."""
    dest = prefix.strip("-").replace("-", "_")
    dest = f"{dest}_" if dest else ""
    values = {option.name: getattr(args, dest + option.name, None) for option in arguments()}
    return {name: value for name, value in values.items() if value is not None}


def given_words(args: argparse.Namespace, but: Sequence[str] = ()) -> list[str]:
    """The options that were given on the command line, as its words; without those in `but`."""
    return [
        word
        for name, value in given_flags(args, "--").items()
        if name not in but
        for word in ([spelled(name, "--")] if value is True else [spelled(name, "--"), str(value)])
    ]
