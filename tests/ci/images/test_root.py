"""The programs that make a root file system are scripts here, which note what they are asked for."""

from pathlib import Path

import pytest

from bundle.errors import BundleError
from images import root
from images.engine import Engine


class Fake(Engine):
    """An engine without images, or with all; `built` holds the names of those that it was given."""

    here = False
    built: list[str] = []  # noqa: RUF012 # emptied by the fixture

    def told(self, image: str, what: str) -> str | None:
        return "0123" if self.here else None

    def run(self, *arguments: str | Path) -> str:
        self.built.append(str(arguments[-1]))
        return "0123"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of its own, and the file in which its mmdebstrap notes how it was called; root gives the commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in (("mmdebstrap", f'echo "$SOURCE_DATE_EPOCH $*" >>{tmp_path}/calls'), ("apt-config", "")):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(root.os, "geteuid", lambda: 0)
    monkeypatch.setattr(Fake, "here", False)
    Fake.built.clear()
    return tmp_path / "calls"


def test_what_is_in_it_is_in_its_name_and_its_dates_are_the_layers(machine: Path) -> None:
    engine = Fake("podman")
    whole, essential = root.make(engine), root.make(engine, ())
    assert whole != essential
    assert root.make(engine) == whole
    one, other, _ = machine.read_text().splitlines()
    for line in (one, other):
        assert line.startswith("315532800 --quiet --variant=essential ")
    assert "--include=openssh-client,openssh-server,passwd,tini," in one
    assert "--include" not in other
    assert engine.built == [whole, essential, whole]


@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        ("root", "only root can make a root file system; run as root, or name an image to fetch"),
        ("mmdebstrap", "mmdebstrap is missing; ci/install_tools mmdebstrap installs it"),
        ("success", "could not make Debian bookworm:\nno mirror answers"),
    ],
)
def test_what_it_lacks_is_an_error_with_what_to_do(
    machine: Path, monkeypatch: pytest.MonkeyPatch, lacking: str, words: str
) -> None:
    program = machine.parent / "bin/mmdebstrap"
    if lacking == "root":
        monkeypatch.setattr(root.os, "geteuid", lambda: 1000)
    elif lacking == "mmdebstrap":
        program.unlink()
    else:
        program.write_text("#!/bin/sh\necho no mirror answers >&2; exit 1\n")
    with pytest.raises(BundleError, match=words):
        root.make(Fake("podman"))
