"""Absurd input is refused at once in one line: endless numbers, endless files, names that are too long."""

import json
from pathlib import Path

import pytest

from ddl import ddlrun

LONG = "x" * 5000
DIGITS = "9" * 5000  # more than Python makes a number of
HUGE = "100000000000000000000000000"

COMMAND_LINES = {
    "more ranks than any job has": (("-np", HUGE, "true"), 2, "-np/-n: '1000"),
    "a number with 5,000 digits": (("-np", DIGITS, "true"), 2, "(5,000 characters)"),
    "ranks of each host": (("--accelerators", HUGE, "true"), 2, "--accelerators: "),
    "seconds": (("--start-timeout", HUGE, "true"), 2, "--start-timeout: "),
    "slots": (("-H", f"localhost:{HUGE}", "true"), 2, "not a number of slots; expected a whole number, at most"),
    "more slots together than a job has": (
        ("-H", ",".join(["localhost:1048576"] * 2), "true"), 3, "ranks: there would be 2,097,152, and a job has at",
    ),
    "a dimension": (("-m", f"r:{HUGE}x2", "true"), 2, "expected dimensions, such as p:4x2x1x1"),
    "a host file without end": (("-hostfile", "/dev/full", "true"), 2, "-hostfile='/dev/full': cannot be read: "),
    "the same for the doctor": (("doctor", "-hostfile", "/dev/full"), 2, "-hostfile='/dev/full': cannot be read: File"),
    "the same for the benchmark": (("bench", "-hostfile", "/dev/full"), 2, "-hostfile='/dev/full': cannot be read: "),
    "a rank file without end": (("-rf", "/dev/zero", "true"), 2, "-rf='/dev/zero': cannot be read: File too large"),
    "a host's name": (("-H", LONG, "true"), 2, "is not a host name"),
    "a part of a host's name": (("-H", f"{'x' * 64}.example", "true"), 2, "is not a host name"),
    "a program's name": ((LONG,), 2, "not found on PATH"),
    "no program": (("--skipchecks", ""), 2, "PROGRAM is empty; expected a program to run"),
    "a folder": (("--log-dir", LONG, "true"), 2, "File name too long; expected a folder"),
    "no option of libddl": (("--dry-run", "--ddlarg", "a b", "true"), 2, "--ddlarg: 'a' is not an option of libddl"),
    "an option of libddl without its value": (("--ddlarg", "-dbg_level", "true"), 2, "'-dbg_level' has no value"),
    "a picture": (("plan", "--plot", f"{LONG}.svg"), 2, "File name too long; name another file"),
    "a picture of the benchmark": (("bench", "--plot", f"{LONG}.svg"), 2, "File name too long; name another file"),
    "figures": (("bench", "--json", LONG), 2, "File name too long; name another file"),
    "rounds": (("bench", "--rounds", HUGE), 2, "argument --rounds: '1000"),
    "ranks of the benchmark": (("bench", "-np", HUGE), 2, "-np/-n: '1000"),
    "a network's name": (("plan", LONG), 2, "is neither a machine"),
    "no network": (("plan", ""), 2, "'' is neither a machine"),
    "hosts": (("plan", "--hosts", HUGE), 2, "argument --hosts: '1000"),
    "a rate": (("plan", "--link", "1e999gbit"), 2, "argument --link: '1e999gbit': expected a rate"),
    "a time": (("plan", "--latency", "1e999s"), 2, "argument --latency: '1e999s': expected a time"),
}  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", COMMAND_LINES)
def test_a_command_line_that_cannot_be_meant_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words, status, says = COMMAND_LINES[what]
    assert ddlrun.main(words) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("ddlrun: error: ")
    assert says in line


VARIABLES = {
    "more hosts than there are": ({"SLURM_JOB_NODELIST": "n[1-99999999]"}, "'n[1-99999999]': more than 65,536 hosts"),
    "as a product": ({"SLURM_JOB_NODELIST": "n[1-60000][1-60000]"}, "more than 65,536 hosts"),
    "as a sum": ({"SLURM_JOB_NODELIST": "n[1-60000,1-60000]"}, "more than 65,536 hosts"),
    "a number with 5,000 digits": ({"SLURM_JOB_NODELIST": f"n[1-{DIGITS}]"}, "expected numbers and ranges in brackets"),
    "a digit that is no number": ({"SLURM_JOB_NODELIST": "n[²]"}, "expected numbers and ranges in brackets"),
    "tasks": (
        {"SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": f"1(x{HUGE})"},
        "SLURM_TASKS_PER_NODE='1(x1000",
    ),
    "LSF's slots": ({"LSB_MCPU_HOSTS": f"n1 {DIGITS}"}, "is not a number of slots"),
    "an operator's host file": ({"OMPI_MCA_orte_default_hostfile": "/dev/zero"}, "cannot be read: File too large"),
    "libddl's options": ({"DDL_OPTIONS": "a b"}, "DDL_OPTIONS: 'a' is not an option of libddl"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", VARIABLES)
def test_an_environment_that_cannot_be_meant_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    variables, says = VARIABLES[what]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ddlrun.main(["--dry-run", "true"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert says in line


@pytest.mark.parametrize("number", ["²", DIGITS])
def test_a_list_of_gpus_ends_at_what_is_no_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", number)
    assert ddlrun.main(["--dry-run", "true"]) == 0  # CUDA takes it for the end of the list, too


@pytest.mark.parametrize("rank", [HUGE, DIGITS])
def test_a_rank_file_with_a_rank_that_no_job_has_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, rank: str
) -> None:
    (tmp_path / "ranks").write_text(f"rank {rank}=localhost slot=0\n")
    assert ddlrun.main(["-rf", str(tmp_path / "ranks"), "true"]) == 3
    assert "is not a rank; expected a whole number, at most 1,048,575" in capsys.readouterr().err


GOOD = {"size": 4, "bandwidth": "1 GB/s"}
NETWORKS = {
    "an infinite rate": (
        json.dumps({"tiers": [GOOD | {"bandwidth": float("inf")}]}),
        "bandwidth: inf: expected a rate",
    ),
    "a rate that is no number": (
        json.dumps({"tiers": [GOOD | {"bandwidth": float("nan")}]}),
        "bandwidth: nan: expected",
    ),
    "a rate that no float holds": (json.dumps({"tiers": [GOOD | {"bandwidth": 10**400}]}), "expected a rate above 0"),
    "a rate in words": (json.dumps({"tiers": [GOOD | {"bandwidth": "1e999GB/s"}]}), "'1e999GB/s': expected a rate"),
    "a rate of next to nothing": (json.dumps({"tiers": [GOOD | {"bandwidth": 1e-300}]}), "expected a rate above 0"),
    "an infinite time": (json.dumps({"tiers": [GOOD | {"latency": float("inf")}]}), "latency: inf: expected a time"),
    "a time of ages": (json.dumps({"tiers": [GOOD | {"latency": "1e300s"}]}), "latency: '1e300s': expected a time"),
    "an infinite reduction": (json.dumps({"tiers": [GOOD], "reduce": float("inf")}), "reduce: inf: expected a rate"),
    "a number with 5,000 digits": (f'{{"tiers": [{{"size": {DIGITS}}}]}}', "it is not JSON"),
    "a tier without end": (json.dumps({"tiers": [GOOD | {"size": 10**26}]}), "size of tier 0"),
    "brackets without end": ("[" * 200_000, "it is not JSON"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", NETWORKS)
def test_a_network_that_cannot_be_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, what: str) -> None:
    text, says = NETWORKS[what]
    (tmp_path / "network.json").write_text(text)
    assert ddlrun.main(["plan", str(tmp_path / "network.json")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert says in line


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["json", "toml"])
def test_a_network_without_end_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    link = tmp_path / f"network.{kind}"
    link.symlink_to("/dev/zero")
    assert ddlrun.main(["plan", str(link)]) == 2
    assert "it cannot be read: File too large" in capsys.readouterr().err
