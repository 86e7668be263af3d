import os
import subprocess
from pathlib import Path

import pytest

from bundle import folders

ROOT = Path(__file__).parents[3]


def test_what_is_no_source_is_what_git_ignores() -> None:
    ignored = {line for line in (ROOT / ".gitignore").read_text().splitlines() if line and not line.startswith("#")}
    debris = {f"{name}/" for name in folders._DEBRIS_FOLDERS}
    debris |= {f"{name}*/" for name in folders._DEBRIS_BEGINNINGS}
    assert ignored == debris | {"*.egg-info/", "*.so"}
    assert set(folders._DEBRIS_ENDS) == {".egg-info", ".so"}


def test_no_file_that_git_holds_is_taken_for_debris() -> None:
    """A folder of sources that is named build or dist would be missing in a package, and nobody would be told."""
    if not (ROOT / ".git").exists():  # a copy of the tree, without its history
        held = {str(path.relative_to(ROOT)) for path in ROOT.glob("*/*") if path.suffix in (".md", ".toml", ".py")}
    else:
        command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
        held = {name for name in listed.split("\0") if name and os.path.lexists(ROOT / name)}
    assert len(held) > 5
    assert sorted(held - {str(path.relative_to(ROOT)) for path in folders.sources(ROOT)}) == []


def test_a_copy_holds_the_sources_and_no_debris(tmp_path: Path) -> None:
    tree, target = tmp_path / "tree", tmp_path / "target"
    for name in ("a.py", "part/b.py", "build/c.py", "part/__pycache__/b.pyc", "d.so", "e.egg-info/f", ".build-x/g"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    (tree / "link.py").symlink_to("a.py")
    (tree / "a.py").chmod(0o755)
    target.mkdir()
    (target / "of an earlier run").touch()
    folders.copy(tree, target)
    assert sorted(str(path.relative_to(target)) for path in folders.sources(target)) == ["a.py", "link.py", "part/b.py"]
    assert not (target / "of an earlier run").exists()
    assert (target / "link.py").is_symlink()
    assert os.access(target / "a.py", os.X_OK)
    assert folders.checksum(target) == folders.checksum(tree)


@pytest.mark.parametrize("change", ["content", "name", "mode"])
def test_a_checksum_sees_content_names_and_modes(tmp_path: Path, change: str) -> None:
    path = tmp_path / "a.py"
    path.write_text("1")
    before = folders.checksum(tmp_path)
    match change:
        case "content":
            path.write_text("2")
        case "name":
            path.rename(tmp_path / "b.py")
        case _:
            path.chmod(0o755)
    assert folders.checksum(tmp_path) != before


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    folders.write(path, "old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        folders.write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("held", "expected"), [(None, True), ([], True), (["mark"], True), (["mark", "else"], True), (["else"], False)]
)
def test_a_folder_is_ours_where_it_is_empty_or_marked(tmp_path: Path, held: list[str] | None, expected: bool) -> None:
    folder = tmp_path / "folder"
    if held is not None:
        folder.mkdir()
        for name in held:
            (folder / name).touch()
    assert folders.is_ours(folder, "mark") is expected
