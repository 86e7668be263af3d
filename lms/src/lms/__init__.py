"""Large model support: train models whose tensors need more memory than the device has.

Nothing here imports a framework; the names that need one import it when they are first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lms.errors import CorruptionError, LimitError, LMSError, SpillError, UsageError
    from lms.options import Options
    from lms.script import add_arguments, from_args
    from lms.torch.session import LMS, Session, disable, enable

    __version__: str

_HOMES = {
    "LMS": "lms.torch.session",
    "Session": "lms.torch.session",
    "enable": "lms.torch.session",
    "disable": "lms.torch.session",
    "Options": "lms.options",
    "add_arguments": "lms.script",
    "from_args": "lms.script",
    "LMSError": "lms.errors",
    "UsageError": "lms.errors",
    "LimitError": "lms.errors",
    "SpillError": "lms.errors",
    "CorruptionError": "lms.errors",
}

__all__ = [
    "LMS",
    "CorruptionError",
    "LMSError",
    "LimitError",
    "Options",
    "Session",
    "SpillError",
    "UsageError",
    "__version__",
    "add_arguments",
    "disable",
    "enable",
    "from_args",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = _version()
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("bascule-lms")
    except PackageNotFoundError:  # a bare source tree on PYTHONPATH
        return "0+source"
