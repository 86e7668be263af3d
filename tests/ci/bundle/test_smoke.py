"""What must work in an environment, on the small one."""

from pathlib import Path

import pytest
from small_channel import Small

from bundle import base, channel, install, smoke
from bundle.cli import main
from bundle.errors import BundleError
from bundle.folders import Folders

pytestmark = pytest.mark.timeout(600)  # the first test makes the small channel
FAILS = smoke.Check("a step", "small", ("python", "-c", "print('so far'); raise SystemExit(3)"))


@pytest.fixture(scope="module")
def prefix(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("smoke") / "with a space"
    install.install(channel.solve(["small"], small.channels), made)
    return made


def test_a_check_that_fails_is_named_with_its_status_and_its_output(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke, "CHECKS", (FAILS,))
    with pytest.raises(BundleError, match=r"there a step fails with status 3: python -c .*\nso far$"):
        smoke.run(prefix, ["small"])
    smoke.run(prefix, ["bascule-tools"])  # without what it needs it is not run


def test_a_dependency_that_pip_misses_is_an_error(prefix: Path) -> None:
    (library,) = prefix.glob("lib/python3*/site-packages")
    broken = library / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\nRequires-Dist: nowhere\n")
    with pytest.raises(BundleError, match="pip check fails") as caught:
        smoke.run(prefix, [])
    (broken / "METADATA").unlink()
    broken.rmdir()
    assert "broken 1.0 requires nowhere, which is not installed" in str(caught.value)


def test_make_env_fails_where_a_check_does_and_keeps_what_it_installed(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = Folders(small.where.tree, tmp_path / "out")
    (where.out / "bundle").mkdir(parents=True)
    where.channel.symlink_to(small.where.channel)
    base.remember(small.base, where)
    monkeypatch.setattr(smoke, "CHECKS", (FAILS,))
    assert main(["--out", str(where.out), "env", str(where.tree / "envs/small.yaml")]) == 1
    assert "there a step fails with status 3" in capsys.readouterr().err
    assert (where.out / "envs/small/bin/bascule").exists()
