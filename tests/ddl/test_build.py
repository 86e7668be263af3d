"""`python -m ddl.build tensorflow`."""

from __future__ import annotations

import pytest

from ddl import build
from ddl.errors import LibraryError


def test_a_library_has_the_frameworks_version_in_its_name() -> None:
    one, other = build.library_path("2.16.2"), build.library_path("2.21.0")
    assert "tensorflow2.16.2-" in one.name
    assert one != other
    assert one.parent == other.parent == build.SOURCE.parent


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LibraryError, match=r"no C\+\+ compiler: looked for g\+\+ and c\+\+; install one"):
        build.compiler()


def test_a_compiler_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(LibraryError, match="'no-such-compiler' does not run"):
        build._compile(tmp_path / "it.so", [])


def test_without_tensorflow_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorflow", None)
    assert build.main(["tensorflow"]) == 1
    assert "there is no TensorFlow to compile for" in capsys.readouterr().err
