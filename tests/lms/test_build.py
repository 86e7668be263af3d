from __future__ import annotations

import shutil
import stat
import subprocess
from pathlib import Path

import pytest

import lms.build as module
from lms.build import build, compiler, library_path, main
from lms.errors import LMSError


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The pool's sources in a folder of their own, which nothing was compiled in, beside empty hooks."""
    folder = tmp_path / "native"
    folder.mkdir()
    for source in module.POOL.sources:
        shutil.copy(module.NATIVE / source, folder)
    for source in module.HOOKS.sources:
        (folder / source).touch()
    monkeypatch.setattr(module, "NATIVE", folder)
    return folder


def test_a_library_belongs_to_one_pytorch_and_to_one_state_of_the_sources(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = library_path("2.13.0")
    assert "2.13.0" in first.name
    assert library_path("2.14.0") != first
    with monkeypatch.context() as patch:
        patch.setattr(module.platform, "machine", lambda: "pdp11")
        assert library_path("2.13.0") != first
    with monkeypatch.context() as patch:
        patch.setattr(module, "_FLAGS", ("-O0",))
        assert library_path("2.13.0") != first
    (copy / "page_pool.cc").write_text("// other\n")
    assert library_path("2.13.0") != first


def test_it_is_compiled_once_and_an_outdated_one_goes(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["torch"]) == 0
    (made,) = copy.glob("page_pool-*.so")
    assert "is ready" in capsys.readouterr().out
    before = made.stat()
    assert main(["torch"]) == 0
    assert made.stat() == before
    with (copy / "page_pool.h").open("a") as file:
        file.write("// changed\n")
    assert build() != made
    assert len(list(copy.glob("page_pool-*.so"))) == 1
    assert not list(copy.glob(".build-*"))


def test_two_builds_at_once_leave_one_library(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    target = library_path(torch.__version__)

    def other(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        Path(command[command.index("-o") + 1]).write_text("mine")
        target.write_text("theirs, done meanwhile")
        return subprocess.CompletedProcess(command, 0, "", "")

    unlinked: list[Path] = []
    monkeypatch.setattr(module.subprocess, "run", other)
    monkeypatch.setattr(Path, "unlink", lambda path, **_: unlinked.append(path))
    assert build() == target
    assert target.read_text() == "mine"
    assert not unlinked, "somebody may be about to load it"


def test_what_the_compiler_says_is_shown_and_nothing_is_left(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "page_pool.cc").write_text("#error no such luck\n")
    assert main(["torch"]) == 1
    assert "no such luck" in capsys.readouterr().err
    assert not [path for path in copy.iterdir() if path.suffix not in (".h", ".cc")]


def test_without_the_hooks_there_is_a_pool_and_a_warning(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    (copy / "saved_tensor_hooks.cc").write_text("#error no such luck\n")
    assert main(["torch"]) == 0
    assert "warning: no saved-tensor hooks in C++, so Python does their work" in capsys.readouterr().err
    assert [path.name.partition("-")[0] for path in copy.glob("*.so")] == ["page_pool"]


def test_a_missing_compiler_is_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LMSError, match=r"no C\+\+ compiler.*install one"):
        compiler()
    monkeypatch.setenv("CXX", "ccache /no/such/compiler")
    assert compiler() == ["ccache", "/no/such/compiler"]
    with pytest.raises(LMSError, match="'ccache' does not run"):
        build()


def test_a_folder_that_cannot_be_written_is_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy.chmod(stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(LMSError, match="native is not writable: run this as the owner"):
        build()
