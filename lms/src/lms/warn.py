"""Warnings that name the line of the script, and not one of LMS or PyTorch."""

from __future__ import annotations

import sys
import warnings

_OURS = ("lms", "torch")  # packages that are not the script


def warn_script(text: str) -> None:
    """Warn at the innermost line outside LMS and PyTorch, so that filters by module work."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, RuntimeWarning, stacklevel=level)
