import json
import subprocess
import sys
import time
from pathlib import Path

import machine
import pytest

from ddl import ddlrun
from ddl.planning import picture

RACKS = (
    "--hosts", "4", "--ranks", "2", "--racks", "2", "--link", "200mbit", "--uplink", "100mbit", "--size", "64MiB",
)  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    status = ddlrun.main(["plan", *map(str, words)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def answer(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, object]:
    status, out, err = run(capsys, *words, "--json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert isinstance(document, dict)
    return document


def test_a_network_by_flags_is_drawn_with_its_plans_and_their_share_of_the_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, err = run(capsys, *RACKS)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[:2] == [
        "8 ranks",
        "+-- 2 x rack          link 100 Mbit/s (12.5 MB/s), latency 30 us, shared by 4 ranks",
    ]
    assert "allreduce of 64 MiB of float32, simulated" in lines
    (chosen,) = [line for line in lines if line.startswith(">")]
    assert "r:2x2x2 in 512 chunks" in chosen
    assert "99." in chosen
    others = [line for line in lines if line.startswith("   r:") or "recursive doubling" in line]
    assert len(others) == 5
    assert any(line.startswith("bound of any algorithm, by cuts (100%)    5.37 s") for line in lines)
    assert "rack            1,024              16 MiB  100% of the time" in lines


def test_json_has_what_the_text_has(capsys: pytest.CaptureFixture[str]) -> None:
    document = answer(capsys, *RACKS, "--schedule", "--rank", "3")
    assert document["simulation"] is True
    chosen, bounds, schedule = document["chosen"], document["bounds"], document["schedule"]
    assert isinstance(chosen, dict)
    assert isinstance(bounds, dict)
    assert isinstance(schedule, dict)
    assert chosen["share_of_bound"] == pytest.approx(bounds["cut"] / chosen["seconds"])
    assert chosen["algorithm_bandwidth"] == pytest.approx((64 << 20) / chosen["seconds"])
    assert chosen["bus_bandwidth"] == pytest.approx(1.75 * (64 << 20) / chosen["seconds"])
    assert sum(step["nbytes"] for step in schedule["steps"] if step["kind"] == "send") == 2 * 7 / 8 * (64 << 20)


def test_a_plan_that_is_asked_for_comes_first_and_the_library_s_is_among_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = answer(capsys, *RACKS, "-m", "r:8", "--chunks", "4")
    chosen, others = document["chosen"], document["alternatives"]
    assert isinstance(chosen, dict)
    assert isinstance(others, list)
    assert (chosen["plan"], chosen["chunks"], chosen["reason"]) == ("r:8", 4, "as asked for")
    assert others[0]["plan"] == "r:2x2x2"


def test_the_schedule_of_a_rank_is_printed_and_cut_with_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, *RACKS, "--schedule", "--rank", "3", "--chunks", "1")
    assert status == 0
    assert "    0     0  send    bytes 0..33554431 to rank 2, by the rank tier" in out
    status, out, _ = run(capsys, *RACKS, "--schedule", "--size", "1GiB")
    assert "more (--json has them all)" in out.splitlines()[-1]


def test_a_described_file_and_a_machine_of_the_catalogue(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[[tiers]]\nsize = 4\nbandwidth = "10 GB/s"\n')
    assert answer(capsys, path)["ranks"] == 4
    assert answer(capsys, "ac922-6", "-hosts", "72", "--racks", "4")["ranks"] == 432
    status, out, _ = run(capsys, "--list")
    assert status == 0
    assert "ac922-4" in out
    assert "REDP-5472" in out


def test_1024_ranks_in_three_tiers_are_planned_in_less_than_10_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("hgx-h100", "--hosts", "128", "--racks", "8", "--size")
    plans = []
    for size in ("4KiB", "1MiB", "256MiB"):
        before, began = time.process_time(), time.monotonic()
        document = answer(capsys, *words, size)
        took = time.process_time() - before  # others may want the cores too
        plans.append({"size": size, "processor": took, "seconds": time.monotonic() - began})
        assert took < 10
        assert document["ranks"] == 1024
    machine.keep("plan", {"command": " ".join(["ddlrun plan", *words[:-1]]), "ranks": 1024, "plans": plans})


@pytest.mark.parametrize(
    "odd",
    [(), ("host7=1gbit",), ("host0-31=48", "host32-63=80"), ("host0-31=48", "host7=1gbit")],
    ids=["even", "slow link", "uneven hosts", "both"],
)
@pytest.mark.parametrize("racks", [1, 8])
def test_4096_ranks_are_planned_in_less_than_10_seconds(
    capsys: pytest.CaptureFixture[str], racks: int, odd: tuple[str, ...]
) -> None:
    words = ["--ranks", "64", "--hosts", "64", "--racks", str(racks), "--link", "10gbit"]
    words += [word for one in odd for word in ("--odd", one)]
    before = time.process_time()
    document = answer(capsys, *words)
    assert time.process_time() - before < 10
    assert document["ranks"] == (3584 if odd == ("host0-31=48", "host7=1gbit") else 4096)
    bounds, chosen = document["bounds"], document["chosen"]
    assert isinstance(bounds, dict)
    assert isinstance(chosen, dict)
    assert bounds["cut"] <= chosen["seconds"]
    assert ("=48" in " ".join(odd)) == (bounds["hierarchical"] == 0)


def test_published_systems_are_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--published")
    assert status == 0
    assert "FORECAST, not measured" in out
    assert "ORNL, Summit, 144" in out
    assert answer(capsys, "--published")["simulation"] is True


def test_more_ranks_than_elements_are_planned_in_seconds_and_it_says_what_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = time.process_time()
    status, out, _ = run(capsys, "--hosts", "8192", "--size", "32000")
    assert time.process_time() - before < 10
    assert status == 0
    assert "plan recursive doubling: not what the library does" in out


def test_what_mpi_does_is_said_to_be_timed_as_rings_and_its_steps_have_their_tier(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = run(capsys, *RACKS, "-m", "rrm:2x2x2", "--chunks", "1", "--schedule")
    assert status == 0
    assert "(timed as rings in each dimension" in out
    assert "allgather" in out
    assert ", among ranks of the rack tier" in out
    flat = run(capsys, "--hosts", "4", "-m", "m:4", "--size", "1MiB")[1]
    assert "m:4 (flat ring)" not in flat
    assert "timed as rings" not in run(capsys, "--hosts", "4", "--size", "1MiB")[1]


@pytest.mark.parametrize(("size", "dtype", "nbytes"), [("6", "float32", 4), ("1", "float64", 8), ("7", "int8", 7)])
def test_only_whole_elements_are_counted(
    capsys: pytest.CaptureFixture[str], size: str, dtype: str, nbytes: int
) -> None:
    document = answer(capsys, "--hosts", "2", "--link", "1GB/s", "--size", size, "--type", dtype)
    assert document["bytes"] == nbytes
    bounds, chosen = document["bounds"], document["chosen"]
    assert isinstance(bounds, dict)
    assert isinstance(chosen, dict)
    assert bounds["cut"] == pytest.approx(nbytes / 1e9)
    assert chosen["algorithm_bandwidth"] == pytest.approx(nbytes / chosen["seconds"])


def test_thousands_of_ranks_work(capsys: pytest.CaptureFixture[str]) -> None:
    document = answer(capsys, "ac922-6", "--hosts", "512", "--racks", "8", "--aisles", "4", "--size", "100MB")
    assert document["ranks"] == 3072
    chosen = document["chosen"]
    assert isinstance(chosen, dict)
    assert 0.5 < chosen["share_of_bound"] <= 1


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture_of_time_against_size(capsys: pytest.CaptureFixture[str], tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"times{suffix}"
    assert run(capsys, *RACKS, "--plot", path)[0] == 0
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    if suffix == ".svg":
        assert b"SIMULATION" in content
        assert b"recursive halving, doubling" in content
    assert list(tmp_path.iterdir()) == [path]


def test_without_matplotlib_a_picture_says_what_to_install_before_anything_is_computed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = run(capsys, *RACKS, "--plot", tmp_path / "times.png")
    assert (status, out) == (2, "")
    assert "pip install './ddl[plot]'" in err


def test_the_scaling_table_names_itself_a_simulation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = run(capsys, "--scaling")
    assert status == 0
    assert "SIMULATION" in out.splitlines()[0]
    assert out.splitlines()[-1].startswith("  256  60.6 (94.7%)")
    document = answer(capsys, "--scaling")
    assert document["simulation"] is True
    slower = answer(capsys, "--scaling", "--link", "25gbit", "--latency", "1us,50us")
    (inside, link) = slower["network"]["tiers"]  # type: ignore[index]
    assert (inside["latency"], link["bandwidth"], link["latency"]) == (1e-6, 25e9 / 8, 50e-6)
    assert slower["rows"][-1]["after"] > 1.2 * document["rows"][-1]["after"]  # type: ignore[index]
    pytest.importorskip("matplotlib")
    picture.check(tmp_path / "a.svg")
    run(capsys, "--scaling", "--plot", tmp_path / "scaling.svg")
    assert b"SIMULATION" in (tmp_path / "scaling.svg").read_bytes()


def test_whoever_has_read_enough_of_it_is_no_error() -> None:
    words = [sys.executable, "-m", "ddl.ddlrun", "plan", "--hosts", "64", "--schedule", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as plan:
        assert plan.stdout is not None
        assert plan.stderr is not None
        assert plan.stdout.readline() == "{\n"
        plan.stdout.close()
        assert plan.stderr.read() == ""
        assert plan.wait(60) == 0


def test_a_picture_that_cannot_be_written_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")

    def write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(picture, "write", write)
    status, _, err = run(capsys, "--hosts", "2", "--plot", tmp_path / "a.svg")
    assert (status, err) == (
        1, f"ddlrun: error: plan: {tmp_path / 'a.svg'} could not be written: No space left on device\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hosts", "0"), "argument --hosts: '0': expected a whole number, 1 or more"),
        (("--link", "200"), "argument --link: '200': expected a rate above 0"),
        (("--size", "big"), "argument --size: 'big': expected a size"),
        (("--latency", "1us,2"), "argument --latency: '2': expected a time"),
        (("--host", "4"), "--host: unknown option; did you mean --hosts?"),
        (("--hosts", "4294967298"), "argument --hosts: '4294967298': expected a whole number, at most 1,048,576"),
        (("--hosts", "4", "--chunks", "4294967297"), "argument --chunks: '4294967297': expected a whole"),
        (("--hosts", "4", "--schedule", "--rank", "4294967296"), "argument --rank: '4294967296': expected a whole"),
        (("--plot", "/no/such/a.svg"), "argument --plot: '/no/such/a.svg': there is no folder /no/such"),
        (("--plot", "/tmp"), "argument --plot: '/tmp' is a folder; expected a file"),
        (("nowhere",), "plan: 'nowhere' is neither a machine of the catalogue"),
        (("--hosts", "5", "--racks", "2"), "plan: 5 hosts cannot be divided evenly among 2 racks"),
        (("--hosts", "4", "-m", "r:3"), "plan: dimensions 3 multiply to 3, but there are 4 ranks"),
        (("--hosts", "4", "--schedule", "--rank", "4"), "plan: rank 4 is not in a plan of 4"),
        (("--scaling", "--size", "64MiB"), "plan: --size is not for --scaling, whose table sets"),
        (("--scaling", "-m", "r:4"), "plan: --mode is not for --scaling"),
        (("--scaling", "--aisle-link", "1gbit"), "plan: --aisle-link is not for --scaling"),
        (("--hosts", "4", "--odd", "host4=2"), "plan: odd host 4: there are 4 of them, counted from 0"),
        (("--hosts", "4", "--odd", "host4"), "argument --odd: 'host4': expected a tier, numbers and"),
        (("--scaling", "--odd", "host0=1gbit"), "plan: --odd is not for --scaling"),
        (("--published", "--hosts", "4"), "plan: --published has its own machines"),
        (("--scaling", "--schedule"), "plan: --schedule is not for --scaling"),
        (("--plot", "times.gif"), "plan: times.gif: a picture ends in .png or .svg"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("ddlrun: error: ")
    assert message in line


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert run(capsys, "-h")[1] == out
    for word in ("examples:", "ddlrun plan --hosts 4 --ranks 2 --racks 2", "of the bound", "95.6%", "--scaling"):
        assert word in out
