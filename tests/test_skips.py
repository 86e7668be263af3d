import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent / "conftest.py"
SKIPS = {
    "in a test": "import pytest\ndef test_it():\n    pytest.skip({reason!r})\n",
    "by a mark": "import pytest\n@pytest.mark.skipif(True, reason={reason!r})\ndef test_it(): pass\n",
    "of a module": "import pytest\npytest.skip({reason!r}, allow_module_level=True)\n",
}


def run(folder: Path, source: str, *, ci: bool) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "test_it.py").write_text(source)
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_ADDOPTS")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), "-ra", str(folder)]
    return subprocess.run(
        command,
        env=environment | ({"CI": "true"} if ci else {}),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.mark.parametrize("how", SKIPS)
def test_an_unexpected_skip_fails_in_ci_and_is_named(tmp_path: Path, how: str) -> None:
    done = run(tmp_path, SKIPS[how].format(reason="the moon is full"), ci=True)
    assert done.returncode not in (0, 5), done.stdout
    assert "skipped in CI, unexpectedly: the moon is full" in done.stdout
    assert "test_it.py" in done.stdout


@pytest.mark.parametrize("how", SKIPS)
def test_an_expected_skip_is_no_failure_in_ci(tmp_path: Path, how: str) -> None:
    done = run(tmp_path, SKIPS[how].format(reason="no GPU here") + "def test_other(): pass\n", ci=True)
    assert "1 skipped" in done.stdout
    assert done.returncode in (0, 5)  # 5: the module that was skipped held the only tests


@pytest.mark.parametrize("how", SKIPS)
def test_elsewhere_a_skip_is_one_line_of_the_report(tmp_path: Path, how: str) -> None:
    done = run(tmp_path, SKIPS[how].format(reason="the moon is full"), ci=False)
    assert [line for line in done.stdout.splitlines() if line.startswith("SKIPPED") and "the moon is full" in line]
    assert done.returncode in (0, 5)


def test_an_expected_failure_is_no_skip(tmp_path: Path) -> None:
    done = run(tmp_path, "import pytest\n@pytest.mark.xfail\ndef test_it(): assert False\n", ci=True)
    assert "1 xfailed" in done.stdout
    assert done.returncode == 0
