"""Helm 3 and 4 and Kubernetes' schemas, as `ci/chart_tools` has put them into out/tools."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from charts import TOOLS, Helm


@pytest.fixture(scope="session")
def tools() -> Path:
    """out/tools, and its Python packages importable; skips where `ci/chart_tools` has not run."""
    if not (TOOLS / "pins").exists():
        pytest.skip("helm is missing: ci/chart_tools puts it into out/tools")
    if str(TOOLS / "python") not in sys.path:
        sys.path.append(str(TOOLS / "python"))  # last: what .venv has is taken from there
    return TOOLS


@pytest.fixture(scope="session", params=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest, tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Each Helm in turn."""
    return Helm(tools / "bin" / request.param, tmp_path_factory.mktemp(request.param))
