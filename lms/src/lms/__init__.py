"""Large model support: train models whose tensors need more memory than the device has.

Where things go (docs/lms.md, "Source layout", has the files):

- A tensor that PyTorch's autograd saves: into `lms.torch`, by its hooks. It becomes a tensor of a trace, on which
  `lms.core` decides, and its bytes go to a tier of `lms.memory`.
- The state of an optimizer, gradients and parameters: they stay where they are, so far. Traces and plans have them as
  tensors that live on from step to step.
- TensorFlow's graph of a training step: into `lms.tensorflow`, which puts copies into it by a plan of `lms.core`.

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
    "lms.torch.session": ("LMS", "Session", "enable", "disable"),
    "lms.options": ("Options",),
    "lms.script": ("add_arguments", "from_args"),
    "lms.errors": ("LMSError", "UsageError", "LimitError", "SpillError", "CorruptionError"),
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
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is not None:
        value: object = getattr(import_module(home), name)
    elif name == "__version__":
        value = _version()
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
