"""The names that docs/python.md tells people to import."""

import importlib
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/python.md"


def test_each_import_on_the_page_works() -> None:
    imports = re.findall(r"^from (lms[\w.]*) import ([\w, ]+)$", PAGE.read_text(), re.MULTILINE)
    assert {module for module, _ in imports} >= {"lms.link", "lms.plan", "lms.trace"}
    for module, names in imports:
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
