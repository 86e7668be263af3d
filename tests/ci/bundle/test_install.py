"""Real installs from the small channel."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import rattler_build
from small_channel import PLATFORM, Small, differences, tree

from bundle import channel, install
from bundle.errors import BundleError

pytestmark = pytest.mark.timeout(600)  # the first test makes the small channel

# 254 bytes with the longest name below it: what a binary's placeholder holds.
LONG = "a" * 60


def run(prefix: Path, *command: str) -> str:
    variables = {"PATH": f"{prefix / 'bin'}:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=60).stdout


def test_an_environment_is_installed_and_its_command_runs(small: Small, tmp_path: Path) -> None:
    prefix = tmp_path / "with a space"
    install.install(channel.solve(["small"], small.channels), prefix)
    said = run(prefix, str(prefix / "bin/bascule"), "info")
    assert f"environment   {prefix}" in said
    assert "bascule-tools 0.1.0" in run(prefix, str(prefix / "bin/bascule"), "licenses")
    assert install.clobbered(prefix) == []


def test_installing_removing_and_installing_again_leaves_no_trace(small: Small, tmp_path: Path) -> None:
    prefix = tmp_path / "env"
    python, all_ = (channel.solve([spec], small.channels) for spec in ("python", "small"))
    install.install(python, prefix)
    before = tree(prefix)
    install.install(all_, prefix)
    first = tree(prefix)
    assert any("bascule" in path for path in first)
    install.install(python, prefix)
    assert differences(before, tree(prefix)) == []
    install.install(all_, prefix)
    assert differences(first, tree(prefix)) == []


def test_an_environment_that_was_not_made_here_is_left_alone(small: Small, tmp_path: Path) -> None:
    prefix = tmp_path / "miniconda3"
    install.install(channel.solve(["small"], small.channels), prefix)
    (prefix / install.MARK).unlink()  # as one that conda has made
    before = tree(prefix)
    with pytest.raises(BundleError) as caught:
        install.install(channel.solve(["python"], small.channels), prefix)
    assert "holds what was not made here" in str(caught.value)
    assert "name an empty or a new folder (PREFIX=DIR)" in str(caught.value)
    assert tree(prefix) == before


def test_a_pin_that_nothing_satisfies_shows_the_solvers_explanation(small: Small) -> None:
    with pytest.raises(BundleError) as caught:
        channel.solve(["small", "bascule-tools >=7"], small.channels)
    assert "no set of packages has small, bascule-tools >=7" in str(caught.value)
    assert "bascule-tools" in str(caught.value).partition(":\n")[2]


def test_an_installation_that_is_interrupted_leaves_nothing(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(*_: object, target_prefix: Path, **__: object) -> None:
        (target_prefix / "bin").mkdir(parents=True)
        raise KeyboardInterrupt

    records = channel.solve(["small"], small.channels)
    monkeypatch.setattr("rattler.install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        install.install(records, tmp_path / "env")
    assert not (tmp_path / "env").exists()


@pytest.fixture
def damaged(small: Small, tmp_path: Path) -> Path:
    """A copy of the small channel."""
    shutil.copytree(small.where.channel, tmp_path / "channel")
    return tmp_path / "channel"


@pytest.mark.parametrize("damage", ["truncated", "its last bytes are gone", "corrupted"])
def test_a_package_that_is_damaged_is_refused_and_nothing_is_left(
    small: Small, damaged: Path, tmp_path: Path, damage: str
) -> None:
    (path,) = damaged.glob("noarch/bascule-tools-*.conda")
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        del content[len(content) // 2 :]
    elif damage == "its last bytes are gone":  # an unpacker may never look at them
        del content[-100:]
    else:
        content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    prefix = tmp_path / "env"
    records = channel.solve(["small"], [damaged.as_uri(), small.base.address])
    with pytest.raises(BundleError, match="was not touched") as caught:
        install.install(records, prefix)
    assert "bascule-tools" in str(caught.value)
    assert not prefix.exists()


def test_a_file_of_two_packages_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "channel" / PLATFORM
    folder.mkdir(parents=True)
    for name in ("one", "two"):
        stage = tmp_path / name
        (stage / "etc").mkdir(parents=True)
        (stage / "etc/both").write_text(f"of {name}\n")
        (stage / "etc" / name).touch()
        files = rattler_build.collect_files(stage)
        rattler_build.assemble_package(name, "1.0", PLATFORM, "0", folder, files=files)
    channel.index(folder.parent)
    prefix = tmp_path / "env"
    install.install(channel.solve(["one", "two"], [folder.parent.as_uri()]), prefix)
    assert (prefix / "etc/both").read_text() in ("of one\n", "of two\n")
    assert len(list(prefix.glob("__clobbers__/*/etc/both"))) == 1
    assert install.clobbered(prefix) == ["etc/both (one and two)"]


@pytest.mark.root
def test_a_full_disk_leaves_nothing_behind(small: Small, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", full]).returncode:
        pytest.skip("only root can make a small file system")
    try:
        with pytest.raises(BundleError, match="No space left on device"):
            install.install(channel.solve(["small"], small.channels), full / "env")
        assert not (full / "env").exists()
    finally:
        subprocess.run(["umount", full], check=True)
