"""Real installs from the small channel."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import rattler_build
from small_channel import PLATFORM, ROOT, Small, differences, tree

from bundle import index, install
from bundle.errors import InstallError, SolveError

pytestmark = pytest.mark.timeout(600)  # the first test makes the small channel

# 254 bytes with the longest name below it: what a binary's placeholder holds.
LONG = "a" * 60


def run(prefix: Path, *command: str) -> str:
    variables = {"PATH": f"{prefix / 'bin'}:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=60).stdout


def test_an_environment_is_installed_and_its_command_runs(small: Small, tmp_path: Path) -> None:
    prefix = tmp_path / "with a space"
    install.install(install.solve(["small"], small.channels), prefix)
    said = run(prefix, str(prefix / "bin/bascule"), "info")
    assert f"environment   {prefix}" in said
    assert "bascule-tools 0.1.0" in run(prefix, str(prefix / "bin/bascule"), "licenses")
    assert install.clobbered(prefix) == []


def test_installing_removing_and_installing_again_leaves_no_trace(small: Small, tmp_path: Path) -> None:
    prefix = tmp_path / "env"
    python, all_ = (install.solve([spec], small.channels) for spec in ("python", "small"))
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
    install.install(install.solve(["small"], small.channels), prefix)
    (prefix / install.MARK).unlink()  # as one that conda has made
    before = tree(prefix)
    with pytest.raises(InstallError) as caught:
        install.install(install.solve(["python"], small.channels), prefix)
    said = str(caught.value)
    assert "was not made here, and would be emptied of its 3 packages (bascule-tools-0.1.0-" in said
    assert "name an empty or a new folder (PREFIX=DIR)" in said
    assert "remove it" in said
    assert tree(prefix) == before


def test_an_environment_for_another_place_bears_no_mark(small: Small, tmp_path: Path) -> None:
    records = install.solve(["python"], small.channels)
    install.install(records, tmp_path / "whole", tmp_path / "cache", target=Path("/opt/conda"))
    assert (tmp_path / "whole/bin/python").exists()
    assert not (tmp_path / "whole" / install.MARK).exists()


@pytest.mark.parametrize("there", [False, True])
def test_a_claim_without_an_installation_leaves_what_was_there(tmp_path: Path, there: bool) -> None:
    prefix = tmp_path / "env"
    if there:
        prefix.mkdir()
    with install.claimed(prefix):
        assert (prefix / install.MARK).exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["env"] * there


def test_a_second_run_waits_for_the_prefix_also_where_the_first_has_removed_it(tmp_path: Path) -> None:
    prefix = tmp_path / "env"
    program = "import sys; from pathlib import Path; from bundle import install\n"
    program += "with install.claimed(Path(sys.argv[1])):\n    Path(sys.argv[1], 'mine').touch()"
    command = [sys.executable, "-c", program, str(prefix)]
    with install.claimed(prefix):
        second = subprocess.Popen(command, cwd=ROOT / "ci", stderr=subprocess.PIPE, text=True)
        assert second.stderr is not None
        assert f"another run (process {os.getpid()}) works in {prefix}: waiting" in second.stderr.readline()
        assert not (prefix / "mine").exists()
    second.communicate(timeout=60)
    assert second.returncode == 0
    assert sorted(path.name for path in prefix.rglob("*")) == ["bascule", "conda-meta", "mine"]


def test_an_environment_works_below_a_long_path(small: Small, tmp_path: Path) -> None:
    prefix = tmp_path
    while len(str(prefix)) < 180:
        prefix = prefix / LONG
    prefix.parent.mkdir(parents=True)
    install.install(install.solve(["small"], small.channels), prefix)
    assert str(prefix) in run(prefix, str(prefix / "bin/bascule"), "info")


def test_a_pin_that_nothing_satisfies_shows_the_solvers_explanation(small: Small) -> None:
    with pytest.raises(SolveError) as caught:
        install.solve(["small", "bascule-tools >=7"], small.channels)
    assert "no set of packages has small, bascule-tools >=7" in str(caught.value)
    assert "bascule-tools" in str(caught.value).partition(":\n")[2]


def test_an_installation_that_is_interrupted_leaves_nothing(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(*_: object, target_prefix: Path, **__: object) -> None:
        (target_prefix / "bin").mkdir(parents=True)
        raise KeyboardInterrupt

    records = install.solve(["small"], small.channels)
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
    records = install.solve(["small"], [damaged.as_uri(), *small.base.channels])
    with pytest.raises(InstallError, match="nothing was left behind") as caught:
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
    index.index(folder.parent)
    prefix = tmp_path / "env"
    install.install(install.solve(["one", "two"], [folder.parent.as_uri()]), prefix)
    assert (prefix / "etc/both").read_text() in ("of one\n", "of two\n")
    assert len(list(prefix.glob("__clobbers__/*/etc/both"))) == 1
    assert install.clobbered(prefix) == ["etc/both (one and two)"]


def test_an_index_is_written_for_a_folder_without_packages(tmp_path: Path) -> None:
    index.index(tmp_path)
    assert (tmp_path / "noarch/repodata.json").is_file()


@pytest.mark.root
def test_a_full_disk_leaves_nothing_behind(small: Small, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", full]).returncode:
        pytest.skip("only root can make a small file system")
    try:
        with pytest.raises(InstallError, match="No space left on device"):
            install.install(install.solve(["small"], small.channels), full / "env")
        assert not (full / "env").exists()
    finally:
        subprocess.run(["umount", full], check=True)
