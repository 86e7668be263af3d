"""The site: `make docs` writes it to out/docs. Its sources are docs/ and the pages at the top of the repository."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / part / "src") for part in ("lms", "ddl", "frontends/glm", "frontends/caffe")]

project = html_title = "Bascule"
html_theme = "furo"
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
autodoc_mock_imports = ["tensorflow", "keras"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
