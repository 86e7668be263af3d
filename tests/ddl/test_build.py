"""`python -m ddl.build torch`: what it compiles, for which PyTorch, and its message if it cannot."""

from __future__ import annotations

import shutil
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

import ddl.build as module
from ddl.build import BuildError, build, compiler, library_path, main

torch = pytest.importorskip("torch")


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sources in a folder of their own, which nothing was compiled in."""
    folder = tmp_path / "native"
    folder.mkdir()
    for source in module.SOURCES:
        shutil.copy(source, folder)
    monkeypatch.setattr(module, "NATIVE", folder)
    monkeypatch.setattr(module, "SOURCES", tuple(folder / source.name for source in module.SOURCES))
    return folder


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of a compiler that takes no time."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        Path(command[command.index("-o") + 1]).write_text("made")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(module.subprocess, "run", run)
    return commands


def test_every_source_is_named() -> None:
    assert {path.name for path in module.NATIVE.iterdir() if path.suffix in (".h", ".cc")} == {
        source.name for source in module.SOURCES
    }


def another(**changes: object) -> SimpleNamespace:
    its = {"__version__": torch.__version__, "version": torch.version, "_C": torch._C}
    return SimpleNamespace(**(its | changes))


def test_a_library_belongs_to_one_pytorch_one_libddl_and_one_state_of_the_sources(
    copy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = library_path(torch)
    assert torch.__version__ in first.name
    assert library_path(another()) == first
    assert library_path(another(__version__="2.11.0")) != first
    assert library_path(another(version=SimpleNamespace(git_version="of my own"))) != first
    assert library_path(another(_C=SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=False))) != first
    assert library_path(another(_C=SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True, _PYBIND11_BUILD_ABI="_x"))) != first
    with monkeypatch.context() as patch:
        patch.setattr(module.sysconfig, "get_config_var", lambda name: "cpython-313-pdp11")
        assert library_path(torch) != first
    with monkeypatch.context() as patch:
        patch.setattr(module, "_FLAGS", ("-O0",))
        assert library_path(torch) != first
    with monkeypatch.context() as patch:
        header = tmp_path / "ddl.h"
        header.write_text(module.interface().read_text() + "/* another interface */\n")
        patch.setattr(module, "interface", lambda: header)
        assert library_path(torch) != first
    (copy / "work.cc").write_text("// other\n")
    assert library_path(torch) != first


def test_it_is_compiled_once_and_an_outdated_one_goes(
    copy: Path, compiled: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    other = copy / "backend-torch1.0-cpython-311-00000000.so"  # another environment's
    other.touch()
    assert main(["torch"]) == 0
    assert "is ready" in capsys.readouterr().out
    made = library_path(torch)
    assert made.read_text() == "made"
    assert main(["torch"]) == 0
    assert len(compiled) == 1
    with (copy / "work.h").open("a") as file:
        file.write("// changed\n")
    assert build() != made
    assert set(copy.glob("*.so")) == {library_path(torch), other}
    assert not list(copy.glob(".build-*"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_compiled_can_be_loaded(copy: Path, command: object) -> None:
    made = build()
    code = (
        "import importlib.machinery as m, importlib.util as u, sys, torch; from ddl import library; library.load();"
        "loader = m.ExtensionFileLoader('_backend', sys.argv[1]);"
        "it = u.module_from_spec(u.spec_from_loader('_backend', loader)); loader.exec_module(it); print(it.Backend)"
    )
    done = command([module.sys.executable, "-c", code, made], timeout=60)  # type: ignore[operator]
    assert done.returncode == 0, done.stdout


def test_what_the_compiler_says_is_shown_and_nothing_is_left(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "reaper.cc").write_text("#error no such luck\n")
    for name in ("errors.cc", "work.cc", "delegated.cc", "backend.cc", "module.cc"):
        (copy / name).write_text("")
    assert main(["torch"]) == 1
    assert "no such luck" in capsys.readouterr().err
    assert sorted(path.name for path in copy.iterdir()) == sorted(source.name for source in module.SOURCES)


def test_a_missing_compiler_is_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler.*install one"):
        compiler()
    monkeypatch.setenv("CXX", "ccache /no/such/compiler")
    assert compiler() == ["ccache", "/no/such/compiler"]
    with pytest.raises(BuildError, match="'ccache' does not run"):
        build()


def test_missing_headers_are_named(copy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module.sysconfig, "get_path", lambda name: str(tmp_path))
        with pytest.raises(BuildError, match=r"has no Python.h: install Python's headers .*python3-dev"):
            build()
    monkeypatch.setattr(module, "__file__", str(tmp_path / "a/b/build.py"))
    monkeypatch.setenv("DDL_LIBRARY", str(tmp_path / "libddl.so"))
    with pytest.raises(BuildError, match=r"ddl.h was not found .*: reinstall bascule-ddl"):
        build()


def test_a_folder_that_cannot_be_written_is_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy.chmod(stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(BuildError, match="native is not writable: run this as the owner"):
        build()
