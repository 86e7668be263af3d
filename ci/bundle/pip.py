"""The pip that works for another Python: .venv and most environments have none of their own."""

from __future__ import annotations

from pathlib import Path

from bundle import interpreter


def command(python: Path) -> list[str]:
    """The pip of the Python that .venv was made with, working for `python`; its command and what goes to it follow."""
    base = interpreter.base_python()
    return [base, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--no-input"]
