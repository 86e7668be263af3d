import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HIDDEN = {".git", ".venv", "out", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}
COMMANDS = ("run", "plan", "simulate", "report", "sweep", "tune")

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
FENCE = re.compile(r"^(```+|~~~+).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)


@cache
def pages() -> dict[Path, str]:
    """Every Markdown page by its path, without its blocks of code."""
    found = {}
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(set(folders) - HIDDEN)
        found |= {
            Path(folder, name): FENCE.sub("", Path(folder, name).read_text()) for name in names if name[-3:] == ".md"
        }
    return found


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as the usual renderers make them."""
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading)).strip().lower().replace(" ", "-") for heading in headings
    }


def links() -> list[tuple[Path, str]]:
    return [(page, link) for page, text in pages().items() for link in LINK.findall(text) if ":" not in link]


def test_every_relative_link_leads_to_a_file_and_a_heading() -> None:
    broken = []
    for page, link in links():
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(pages().get(target, ""))):
            broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_links_are_found_at_all() -> None:
    assert len(links()) > 10


def test_every_page_of_docs_can_be_reached_from_its_index() -> None:
    docs = ROOT / "docs"
    linked = {(page.parent / link.partition("#")[0]).resolve() for page, link in links() if page == docs / "index.md"}
    lost = {page for page in pages() if page.parent == docs} - linked - {docs / "index.md"}
    assert sorted(str(page.relative_to(ROOT)) for page in lost) == []


def test_results_name_no_build_of_a_kernel() -> None:
    """Whoever reads a figure needs the kernel's version, not the build of it that somebody's host runs."""
    texts = {path: path.read_text() for path in (ROOT / "docs/results").iterdir() if path.suffix in (".json", ".md")}
    found = {
        f"{path.name}: {build}"
        for path, text in texts.items()
        for build in re.findall(r'(?:Linux[ -]|"kernel": ")\d+\.\d+[.-]\d\S*', text)
    }
    assert found == set()
    assert any('"kernel": "' in text for text in texts.values())


def test_every_make_target_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        (str(path.relative_to(ROOT)), target)
        for path in pages()
        for target in re.findall(r"(?:^ *|`)make ([a-z][a-z-]*)\b", path.read_text(), re.MULTILINE)
    }
    assert named
    assert {(page, target) for page, target in named if target not in targets} == set()


def help_of(*arguments: str) -> str:
    """What `lms ARGUMENTS --help` prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "lms/src"), "COLUMNS": "200"}
    command = [sys.executable, "-m", "lms", *arguments, "--help"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=110).stdout


def test_every_command_is_in_the_manual() -> None:
    listed = re.findall(r"^    (\w+) ", help_of(), re.MULTILINE)
    assert set(COMMANDS) <= set(listed)
    manual = (ROOT / "docs/cli.md").read_text()
    assert [command for command in listed if f"lms {command}" not in manual] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_in_the_manual(command: str) -> None:
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", help_of(command))) - {"--help"}
    assert options
    manual = (ROOT / "docs/cli.md").read_text()
    assert sorted(option for option in options if not re.search(re.escape(option) + r"(?![\w-])", manual)) == []
