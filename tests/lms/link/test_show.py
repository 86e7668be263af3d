"""`lms link show`: on machines whose NVML is replayed."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from lms import cli
from lms.errors import UsageError
from lms.link import catalogue, nvml, show
from lms.link.profile import MeasuredLink, Profile
from lms.link.series import Series, point


@pytest.fixture
def on(replay: ModuleType, monkeypatch: pytest.MonkeyPatch):
    """Be on a machine of tests/lms/link/nvml."""
    real = nvml.look

    def be(name: str) -> None:
        monkeypatch.setattr(nvml, "look", lambda: real(replay.Replay(name)))

    return be


def printed(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    assert cli.main(["link", "show", *argv]) == status
    out, err = capsys.readouterr()
    return err if status else out


def test_links_have_names_and_ceilings(on, capsys: pytest.CaptureFixture[str]) -> None:
    on("v100_power9")
    text = printed(capsys)
    assert "NVLink 2.0 to the processor, 3 links up" in text
    assert "77.3 GB/s" in text
    assert "6 of 6 (2.0)" in text
    assert "NV#: so many NVLinks that are up" in text
    assert "SYS: " in text
    assert "Nothing of it is measured yet: lms link measure" in text


def test_measured_shares_stand_beside_the_ceilings(on, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on("h100")
    points = (point(1 << 30, [0.03]),)
    series = (Series("out", "pinned", 31.5e9, 0.0, points), Series("back", "pinned", 50.4e9, 0.0, points))
    profile = Profile(
        "x", "measured", (MeasuredLink("gpu0", "gpu", "", series), MeasuredLink("memory", "memory", "", ()))
    )
    (tmp_path / "a.json").write_text(profile.to_json())
    text = printed(capsys, "--measured", str(tmp_path / "a.json"))
    rows = [line.split() for line in text.splitlines() if line.startswith("gpu0 ")]
    assert [row[1:6] for row in rows] == [
        ["out", "pinned", "31.5", "GB/s", "0%"],
        ["back", "pinned", "50.4", "GB/s", "0%"],
    ]
    assert [row[6] for row in rows] == ["50%", "80%"]
    assert "Nothing of it is measured" not in text


def test_a_slot_of_eight_lanes_is_warned_of(on, capsys: pytest.CaptureFixture[str]) -> None:
    on("t4_x8")
    text = printed(capsys)
    assert "\n  x8 lanes at most" in text
    (line,) = [line for line in text.splitlines() if line.startswith("0 ")]
    assert line.split()[-6:] == ["1", "x8", "3", "x8", "-", "-"]


def test_one_gpu_alone(on, capsys: pytest.CaptureFixture[str]) -> None:
    on("h100")
    document = json.loads(printed(capsys, "--json", "--gpu", "1"))
    assert [gpu["index"] for gpu in document["gpus"]] == [1]
    assert [link["name"] for link in document["links"]] == ["gpu1"]
    assert document["matrix"] == [["NV18", "X"]]


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(on, capsys: pytest.CaptureFixture[str]) -> None:
    on("h100")
    assert "--gpu=7: no such GPU; there are: 0, 1" in printed(capsys, "--gpu", "7", status=2)
    on("no_driver")
    assert "there are: none (GPU: the NVIDIA driver is installed and not loaded" in printed(
        capsys, "--gpu", "0", status=2
    )


def test_the_json_is_whole(on, capsys: pytest.CaptureFixture[str]) -> None:
    on("gh200")
    document = json.loads(printed(capsys, "--json"))
    assert document["format"] == "lms-link-show-1"
    assert document["links"][0]["ceiling"]["out"] == 450e9
    assert document["gpus"][0]["warnings"] == []
    assert document["nodes"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_driver", "not here: GPU: the NVIDIA driver is installed and not loaded"),
        ("no_library", "not here: GPU: no NVIDIA driver is installed here"),
        ("no_permission", "the NVIDIA driver refuses this user"),
        ("version_mismatch", "not here: GPU: the NVIDIA driver and its library differ in version"),
        ("falls_off", "it fell off the bus"),
        ("mig", "\n  cut into MIG instances"),
        ("unknown_gpu", "gpu0: "),
    ],
)
def test_a_machine_with_a_fault_is_shown_as_far_as_it_goes(
    on, name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    on(name)
    text = printed(capsys)
    assert "file /" in text
    assert words in text


def test_columns_bear_the_drivers_numbers_when_a_gpu_is_lost(
    replay: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library, real = replay.Replay("v100_power9"), nvml.look
    library.machine["gpus"][0]["lost_after"] = 0
    monkeypatch.setattr(nvml, "look", lambda: real(library))
    lines = printed(capsys).splitlines()
    at = next(at for at, line in enumerate(lines) if line.split() == ["GPU1", "GPU2", "GPU3"])
    assert lines[at + 2].split() == ["GPU2", "SYS", "X", "NV3"]


def test_what_was_measured_in_memory_is_shown(on, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on("no_library")
    memory = MeasuredLink("memory", "memory", "copies", (Series("copy", "2 threads", 9e9, 0.0),))
    (tmp_path / "a.json").write_text(
        Profile("x", "measured", (memory,), machine={"host": show.machine.machine()["host"]}).to_json()
    )
    text = printed(capsys, "--measured", str(tmp_path / "a.json"))
    (line,) = [line for line in text.splitlines() if line.startswith("memory ")]
    assert line.split()[1:6] == ["copy", "2", "threads", "9", "GB/s"]
    assert "figures of" not in text


def test_figures_of_another_machine_are_said_to_be_so(on, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on("h100")
    link = MeasuredLink("gpu0", "gpu", "", (Series("out", "pinned", 31.5e9, 0.0),))
    (tmp_path / "a.json").write_text(Profile("theirs", "measured", (link,), machine={"host": "elsewhere"}).to_json())
    text = printed(capsys, "--measured", str(tmp_path / "a.json"))
    assert "\n  figures of elsewhere, which is not this machine's name" in text


def test_what_to_do_next_shows_the_measured_beside_the_ceilings(on, capsys: pytest.CaptureFixture[str]) -> None:
    on("no_library")
    text = printed(capsys)
    assert text.rstrip().endswith("lms link measure -o here.json, then lms link show --measured here.json")
    assert "\n\n\n" not in text


def test_numa_distances_are_a_table(monkeypatch: pytest.MonkeyPatch, on, capsys: pytest.CaptureFixture[str]) -> None:
    on("no_library")
    nodes = (show.machine.Node(0, (0,), 1, (10, 40)), show.machine.Node(8, (1,), 1, (40, 10)))
    monkeypatch.setattr(show.machine, "nodes", lambda *_: nodes)
    assert "node8             40     10" in printed(capsys)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_gpus_are_drawn(on, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    on("v100_power9")
    path = tmp_path / f"gpus.{suffix}"
    printed(capsys, "--picture", str(path))
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") if suffix == "png" else b"NV3" in content


def test_a_picture_without_gpus_is_refused(on, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on("no_library")
    path = tmp_path / "a.svg"
    said = printed(capsys, "--picture", str(path), status=2)
    assert "there is no GPU to draw here (no NVIDIA driver is installed here" in said
    assert said.endswith("leave the option out to see the other links\n")
    assert said.count("\n") == 1
    assert not path.exists()
    assert "ends with .png or .svg" in printed(capsys, "--picture", "a.gif", status=2)


def test_a_described_machine_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "gh200")
    assert "described, not measured" in text
    assert "arXiv:2407.07850" in text
    assert json.loads(printed(capsys, "gh200", "--json"))["format"] == "lms-link-1"


def test_options_about_this_machine_are_refused_beside_a_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--gpu: about this machine" in printed(capsys, "gh200", "--gpu", "0", status=2)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--dir="):
        show.this_machine(tmp_path / "none")


def test_figures_of_links_that_are_gone_are_kept(on, tmp_path: Path) -> None:
    on("no_library")
    shown = show.this_machine(tmp_path, measured=catalogue.load("gh200"))
    assert "gpu" in [link.name for link in shown.profile.links]
