"""The command `lms`: what it prints, what it refuses, and its exit status."""

import json
import os
import re
import stat
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import lms
from lms import cli, step_cli
from lms.core.trace import Access, Tensor
from lms.errors import CorruptionError, LimitError, LMSError, SpillError, UsageError
from lms.link import KNOWN, Link
from lms.options import arguments
from lms.trace import Trace

MB = 10**6


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in arguments():
        monkeypatch.delenv(f"LMS_{option.name.upper()}", raising=False)


def write_trace(path: Path, *, other: int = 300 * MB, link: bool = True, capacity: int = 10**9) -> str:
    """Eight layers that save 100 MB each, on a device that holds 300 MB beside; the path as text."""
    accesses = [Access("write", at, 1.0, other) for at in range(8)]
    accesses += [Access("read", at, 1.0, other) for at in reversed(range(8))]
    tensors = tuple(
        Tensor(100 * MB, 16 - at, let_go=at + 1, module=f"layer{at}", dtype="float32", shape=(5, 5)) for at in range(8)
    )
    measured = {"name": "file", "out": 2e9, "back": 1e9, "latency": 0.0, "source": "measured"}
    Trace(tensors, tuple(accesses), capacity=capacity, tail=1.0, tail_other=other, link=measured if link else {}).save(
        path
    )
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return write_trace(tmp_path / "step.json")


def refused(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 2) -> str:
    """Run a command that must be refused in one line; the line."""
    assert cli.main(argv) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"lms: error: [^\n]+\n", err)
    return err


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must succeed; what it printed."""
    assert cli.main(argv) == 0
    return capsys.readouterr().out


# The command line itself


def test_python_m_lms_says_its_version_without_any_framework(tmp_path: Path) -> None:
    for name in ("torch", "numpy", "matplotlib", "jinja2"):
        (tmp_path / f"{name}.py").write_text("raise ImportError(__name__)")
    path = os.pathsep.join([str(tmp_path), str(Path(lms.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-m", "lms", "--version"],
        capture_output=True, text=True, check=False, env={"PYTHONPATH": path},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"lms \d\S*\n", done.stdout)


@pytest.mark.parametrize("command", ["run", "plan", "simulate", "report", "sweep"])
def test_every_command_has_help_with_examples_of_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main([command, "--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert f"examples:\n  lms {command} " in text
    assert "--limit" in text


def test_every_example_of_the_help_is_a_command_line_that_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    examples = []
    for command in ([], ["run"], ["plan"], ["simulate"], ["report"], ["sweep"]):
        with pytest.raises(SystemExit):
            cli.main([*command, "--help"])
        examples += re.findall(r"^  lms (\S.*?)(?:   .*)?$", capsys.readouterr().out, re.MULTILINE)
    assert len(examples) > 10
    for example in examples:
        assert callable(cli._parser().parse_args(cli._split(example.split())[0]).action)


@pytest.mark.parametrize("argv", [[], ["fly"], ["run", "--limits", "1GB", "x.py"], ["simulate"]])
def test_a_wrong_command_line_is_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(argv)
    assert done.value.code == 2
    assert "usage: lms" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["run"], ["simulate", "x"], ["link", "show", "x"], ["tune"]])
def test_an_unknown_option_shows_the_usage_of_its_command(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = " ".join(["lms", *command[: 2 if command[0] == "link" else 1]])
    with pytest.raises(SystemExit) as done:
        cli.main([*command, "--limt", "1GB", *(["x.py"] if command[0] in ("run", "tune") else [])])
    assert done.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: {name} [")
    assert f"{name}: error: unknown: --limt 1GB" in err


def test_an_unknown_option_before_the_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--quiet", "run", "--limit", "3GB", "x.py"])
    assert "lms: error: unknown: --quiet" in capsys.readouterr().err


def test_a_document_is_written_though_nobody_reads_the_table(trace: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(lms.__file__).parents[1])}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lms", "simulate", trace, "--json", str(tmp_path / "limits.json")],
            stdout=full, stderr=subprocess.PIPE, check=False, env=environment,
        )  # fmt: skip
    assert done.returncode == 1
    assert json.loads((tmp_path / "limits.json").read_text())["floor"] == 400 * MB


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("argv", [["plan", "--help"], ["--version"], ["simulate", "step.json"]])
def test_a_full_disk_behind_stdout_is_an_error_in_one_line(argv: list[str], unbuffered: str, trace: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(lms.__file__).parents[1]), "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lms", *argv], stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            cwd=Path(trace).parent, env=environment,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "lms: error: stdout: not written: No space left on device; send the output elsewhere\n"


@pytest.mark.parametrize("error", [LMSError, UsageError, LimitError, SpillError, CorruptionError])
def test_an_error_of_lms_is_one_line_and_its_own_exit_status(
    error: type[LMSError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise error("what was\nasked, what was found")

    monkeypatch.setattr(step_cli, "_simulate", fail)
    assert cli.main(["simulate", "x"]) == error.exit_status
    assert capsys.readouterr().err == "lms: error: what was asked, what was found\n"


def test_an_interrupt_ends_with_the_shells_status_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(step_cli, "_simulate", interrupt)
    assert cli.main(["simulate", "x"]) == 130
    assert "Traceback" not in capsys.readouterr().err


# lms run, lms plan: what is refused before anything is run


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["none.py"], "SCRIPT='none.py': no such file"),
        ([], "SCRIPT: none given"),
        (["-m"], "-m: expected the name of a module"),
        (["."], "a folder without __main__.py"),
        (["--limit", "12XB", "script.py"], "--limit='12XB': expected a size"),
        (["--limit", "0", "script.py"], "more than zero"),
        (["--limit=-1GB", "script.py"], "more than zero"),
        (["--limit", "1GB", "--frac", "0.5", "script.py"], "give at most one of --limit, --frac, --budget"),
        (["--frac", "1.5", "script.py"], "--frac='1.5': expected a share above 0 and at most 1"),
        (["--swap", "weights", "script.py"], "'weights' is unknown; expected any of activations, optimizer"),
        (["--spill-dir", "/nowhere", "script.py"], "--spill-dir='/nowhere': it does not exist"),
        (["--trace", ".", "script.py"], "--trace='.': a folder"),
        (["--trace", "script.py/x", "script.py"], "cannot be written to"),
    ],
)
def test_what_cannot_work_is_refused_before_the_script_runs(
    command: str,
    argv: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("raise SystemExit('it ran')")
    assert said in refused(capsys, command, *argv)


@pytest.mark.parametrize(
    ("target", "leave_out"),
    [
        (["python", "train.py", "--epochs", "3"], "'python'.* `lms run train.py --epochs 3`"),
        (["python3.12", "-u", "-m", "package.train"], "'python3.12'.* `lms run -m package.train`"),
        ([sys.executable, "train.py"], "python.* `lms run train.py`"),
    ],
)
def test_an_interpreter_before_the_script_is_to_be_left_out(
    target: list[str], leave_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(f"SCRIPT=.*{leave_out}", refused(capsys, "run", "--limit", "1GB", *target))
    assert "`lms plan " in refused(capsys, "plan", *target)


def test_a_script_may_be_called_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = pytest.importorskip("lms.torch.launcher")
    monkeypatch.setattr(launcher, "run", lambda target, *_, **__: print(target.name) or 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").write_text("print()")
    assert told(capsys, "run", "python", "x") == "python\n"


def test_a_wrong_variable_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").touch()
    monkeypatch.setenv("LMS_LIMIT", "much")
    assert "LMS_LIMIT='much'" in refused(capsys, "run", str(tmp_path / "script.py"))


def test_a_package_that_is_missing_is_named_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").touch()
    monkeypatch.setattr("lms.command.find_spec", lambda name: None if name == "torch" else find_spec(name))
    line = refused(capsys, "run", str(tmp_path / "script.py"))
    assert "torch" in line
    assert "pip install './lms[torch]'" in line


@pytest.mark.parametrize(
    ("own", "target"),
    [
        (["--limit", "1GB"], ["train.py", "--limit", "7", "-m", "x", "--", "--help"]),
        (["--limit=1GB", "--verify"], ["train.py", "--verify"]),
        (["--budget", "0"], ["-m", "package.train", "--limit", "7", "--", "-m"]),
        ([], ["-mpackage.train", "-h"]),
        (["--limit"], []),
        (["--help"], []),
    ],
)
def test_what_stands_behind_the_script_is_the_scripts(own: list[str], target: list[str]) -> None:
    for command in ("run", "plan", "sweep"):
        assert cli._split([command, *own, *target]) == ([command, *own], target)


def test_other_commands_have_no_script(trace: str) -> None:
    assert cli._split(["simulate", trace, "--limit", "1GB"]) == (["simulate", trace, "--limit", "1GB"], [])


# lms simulate


def test_simulate_without_a_bound_prints_the_table_of_limits(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = told(capsys, "simulate", trace)
    assert re.search(r"^unswapped +1\.1 GB,", out, re.MULTILINE)
    assert re.search(r"^floor +400 MB, module 'layer\d'", out, re.MULTILINE)
    assert re.search(r"^ +35% ", out, re.MULTILINE)


def test_simulate_with_a_limit_prints_what_it_costs(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = told(capsys, "simulate", trace, "--limit", "700MB")
    assert "limit 700 MB" in out
    peak = re.search(r"^peak +(\d+) MB$", out, re.MULTILINE)
    assert peak is not None
    assert int(peak[1]) <= 700
    assert "layer3" not in out


def test_simulate_tells_the_step_around_the_pass_if_the_trace_knows_it(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not re.search("^step", told(capsys, "simulate", trace, "--budget", "0"), re.MULTILINE)
    replace(Trace.load(trace), cycle=60.0, busy=20.0).save(trace)
    out = told(capsys, "simulate", trace, "--budget", "800MB")
    assert re.search(r"^pass +17 s \(1\.00 x its computation alone\)$", out, re.MULTILINE)
    assert re.search(r"^step +60 s \(1\.00 x the step with nothing swapped\)$", out, re.MULTILINE)


def test_the_largest_size_is_one_that_can_be_planned_with(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    for bound in ("--budget", "--limit"):
        assert "swapped       0 of" in told(capsys, "simulate", trace, bound, str(2**62))
        assert "at most 2**62 bytes" in refused(capsys, "simulate", trace, bound, str(2**63))


def test_simulate_lists_every_record_with_its_reason_when_asked(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "simulate", trace, "--budget", "0", "--records").splitlines()
    listed = [line for line in lines if re.match(r" +\d+ +100 MB  layer\d  (goes|stays): ", line)]
    assert len(listed) == 8


def test_the_records_of_no_plan_are_refused(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--records: decisions are those of one limit" in refused(capsys, "simulate", trace, "--records")


def test_records_that_cannot_move_are_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace.load(write_trace(tmp_path / "step.json"))
    replace(trace, tensors=(replace(trace.tensors[0], pinned=True), *trace.tensors[1:])).save(tmp_path / "step.json")
    path = str(tmp_path / "step.json")
    assert re.search(r"^saved .* in 7 records$", told(capsys, "simulate", path), re.MULTILINE)
    assert re.search(r"^swapped +6 of 7 records$", told(capsys, "simulate", path, "--budget", "0"), re.MULTILINE)


def test_simulate_knows_what_runs_between_two_passes(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    replace(Trace.load(trace), between=600 * MB).save(trace)
    assert "600 MB, the time between two passes: no limit can be lower" in told(capsys, "simulate", trace)
    assert re.search(r"^peak +600 MB$", told(capsys, "simulate", trace, "--budget", "0"), re.MULTILINE)
    assert "the time between two passes" in refused(capsys, "simulate", trace, "--limit", "599MB", status=3)


def test_the_table_says_what_the_first_pass_takes_if_that_is_more_than_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.json"
    assert "first pass" not in told(capsys, "simulate", write_trace(path))
    trace = Trace.load(path)
    late = trace.with_measured(trace.times, [*trace.others[:9], 700 * MB, *trace.others[10:]])
    late.save(path)
    assert re.search(r"^first pass  up to 1\.1 GB under the lowest limit", told(capsys, "simulate", str(path)), re.M)


def test_the_help_of_simulate_names_no_default_and_both_ways_to_record(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "0.9" not in text
    assert "`lms run --trace` or `lms plan --trace`" in text


def test_simulate_says_how_far_the_plan_is_from_the_best_when_asked(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = told(capsys, "simulate", trace, "--limit", "500MB", "--link", "0.05", "--bound")
    taken, least = (re.search(rf"^{name} +([\d.]+) s", out, re.MULTILINE) for name in ("pass", "bound"))
    assert taken is not None
    assert least is not None
    assert float(least[1]) <= float(taken[1])
    assert re.search(r"^bound .*: no plan takes less; this one ", out, re.MULTILINE)
    assert "--limit" in refused(capsys, "simulate", trace, "--bound")


def test_a_bound_of_a_step_with_state_is_refused_before_anything_is_printed(
    traces: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tape = traces.Tape([4], state={0})
    tape.access("write", 0, 1.0)
    tape.trace().save(tmp_path / "state.json")
    wrong = refused(capsys, "simulate", str(tmp_path / "state.json"), "--budget", "0", "--link", "1", "--bound")
    assert "--bound: this trace has state that lives on in the next step; expected one recorded with act" in wrong


def test_a_bound_without_scipy_says_how_to_get_it(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lms.command.find_spec", lambda name: None)
    assert "./lms[bound]" in refused(capsys, "simulate", trace, "--budget", "0", "--bound")


def test_simulate_takes_a_share_of_the_recorded_device(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "limit 700 MB" in told(capsys, "simulate", trace, "--frac", "0.7")


def test_a_slower_link_costs_more_time(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    def slowdown(link: str) -> float:
        found = re.search(
            r"\((\S+) x its computation", told(capsys, "simulate", trace, "--budget", "0", "--link", link)
        )
        assert found is not None
        return float(found[1])

    assert slowdown("100/100") == 1.0
    assert slowdown("0.05/0.05") > 1.5


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_link_can_be_named(name: str, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{name}: " in told(capsys, "simulate", trace, "--budget", "0", "--link", name)


def test_simulate_writes_the_table_as_json(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "limits.json"
    told(capsys, "simulate", trace, "--json", str(path))
    document = json.loads(path.read_text())
    assert document["floor"] == 400 * MB
    assert len(document["limits"]) == 6


def test_an_option_without_effect_is_a_warning(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", trace, "--budget", "0", "--json", str(tmp_path / "x.json")]) == 0
    assert "lms: warning: --json: without effect" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


def test_simulate_writes_the_predicted_pass_for_perfetto(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "pass.json"
    assert "limit 700 MB" in told(capsys, "simulate", trace, "--limit", "700MB", "--perfetto", str(path))
    document = json.loads(path.read_text())
    assert document["otherData"]["lms"] == "forecast"
    assert {event["tid"] for event in document["traceEvents"] if event["ph"] == "X"} >= {1, 2, 3}
    assert "expected --limit, --frac or --budget" in refused(capsys, "simulate", trace, "--perfetto", str(path))
    assert "--perfetto='.': a folder" in refused(capsys, "simulate", trace, "--budget", "0", "--perfetto", ".")


def test_a_run_of_tensorflow_cannot_be_drawn_copy_by_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lms.command.find_spec", lambda name: name)
    script = tmp_path / "fit.py"
    script.write_text("import keras")
    assert "`lms simulate TRACE --limit SIZE --perfetto FILE`" in refused(
        capsys, "run", "--perfetto", str(tmp_path / "x.json"), str(script)
    )


@pytest.mark.parametrize("command", ["simulate", "report"])
def test_a_limit_below_the_floor_is_refused_with_the_floor_and_its_module(
    command: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, command, trace, "--limit", "350MB", status=3)
    for part in ("350 MB", "400 MB", "'layer"):
        assert part in line


def test_a_folder_as_a_trace_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "TRACE='.': Is a directory" in refused(capsys, "report", ".")


@pytest.mark.parametrize("command", ["simulate", "report"])
def test_a_trace_that_is_missing_is_a_usage_error(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "TRACE='none.json': No such file" in refused(capsys, command, "none.json")


def test_an_unknown_link_is_refused_with_the_known_ones(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nvlink-c2c" in refused(capsys, "simulate", trace, "--link", "string")


def test_a_trace_without_a_link_needs_one_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "step.json", link=False)
    assert "--link: not given" in refused(capsys, "simulate", trace)
    assert "--link: not given" in refused(capsys, "report", trace, "--budget", "0")
    assert "may stay" in told(capsys, "simulate", trace, "--link", "6/2")


def test_a_limit_needs_a_trace_that_measured_the_whole_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "step.json", other=0)
    assert "give --budget" in refused(capsys, "simulate", trace, "--limit", "1GB")
    assert "held at most" in told(capsys, "simulate", trace, "--budget", "0")


def test_a_share_needs_a_trace_that_knows_the_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "step.json", capacity=0)
    assert "--frac: the trace does not say" in refused(capsys, "simulate", trace, "--frac", "0.5")


def test_a_reader_that_has_seen_enough_is_no_error(trace: str) -> None:
    command = [sys.executable, "-m", "lms", "simulate", trace, "--budget", "0", "--records"]
    environment = os.environ | {"PYTHONPATH": str(Path(lms.__file__).parents[1])}
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


# lms report


def test_report_writes_a_page_beside_the_trace_and_says_where(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = told(capsys, "report", trace)
    page = Path(trace).with_suffix(".html")
    assert out == f"{page}\n"
    assert "<svg" in page.read_text()
    assert "decision" not in page.read_text()


def test_report_has_the_name_of_the_script_that_was_recorded(
    trace: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told(capsys, "report", trace)
    assert "<h1>step</h1>" in (tmp_path / "step.html").read_text()
    replace(Trace.load(trace), machine={"script": "train.py"}).save(trace)
    told(capsys, "report", trace)
    assert "<h1>train.py</h1>" in (tmp_path / "step.html").read_text()


def test_report_with_a_limit_shows_the_plan_and_writes_the_picture(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    page, picture = tmp_path / "out" / "page.html", tmp_path / "out" / "memory.png"
    told(capsys, "report", trace, "--limit", "700MB", "-o", str(page), "--picture", str(picture))
    assert "decision" in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_report_refuses_a_place_that_cannot_be_written(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert "--output=" in refused(capsys, "report", trace, "-o", f"{trace}/below.html")


def test_report_names_the_packages_that_it_needs(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lms.command.find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    line = refused(capsys, "report", trace)
    assert "matplotlib" in line
    assert "./lms[report]" in line


# Output files


def test_a_device_as_output_is_written_to_and_stays(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.write_bytes(b"")
    except OSError as error:
        pytest.skip(f"no device can be made here: {error.strerror}")
    for command in (
        ("simulate", trace, "--json", str(device)),
        ("report", trace, "-o", str(device), "--picture", str(device)),
        ("link", "compare", "gh200", "pcie-5", "--json", str(device)),
    ):
        told(capsys, *command)
        assert stat.S_ISCHR(device.lstat().st_mode), command


def test_the_table_is_there_though_it_cannot_be_written(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", trace, "--json", "/dev/full"]) == 1
    out, err = capsys.readouterr()
    assert "may stay" in out
    assert err == "lms: error: --json='/dev/full': not written: No space left on device\n"


def test_plan_prints_its_table_though_it_cannot_be_written(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Trace.load(trace)
    launcher = pytest.importorskip("lms.torch.launcher")
    monkeypatch.setattr(launcher, "record", lambda *_: (0, step, Link.from_dict(step.link)))
    (tmp_path / "train.py").touch()
    for option in ("--json", "--trace"):
        assert cli.main(["plan", option, "/dev/full", str(tmp_path / "train.py")]) == 1
        out, err = capsys.readouterr()
        assert "may stay" in out
        assert f"{option}='/dev/full': not written" in err


def test_a_folder_as_the_tables_file_is_refused_before_the_trace_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--json='.': a folder" in refused(capsys, "simulate", "none.json", "--json", ".")


def test_the_table_and_its_document_can_go_to_one_stdout(trace: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(lms.__file__).parents[1])}
    command = [sys.executable, "-m", "lms", "simulate", trace, "--json", "/dev/stdout"]
    with (tmp_path / "out").open("wb") as file:
        subprocess.run(command, stdout=file, check=True, env=environment)
    piped = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment).stdout
    for out in ((tmp_path / "out").read_text(), piped.decode()):
        table, brace, document = out.partition("{")
        assert "may stay" in table
        assert json.loads(brace + document)["floor"] == 400 * MB


def test_a_link_as_output_is_followed(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = tmp_path / "link.json"
    link.symlink_to("limits.json")
    told(capsys, "simulate", trace, "--json", str(link))
    assert link.is_symlink()
    assert json.loads((tmp_path / "limits.json").read_text())


def test_a_script_that_changes_its_folder_does_not_move_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(target: object, options: object, *, trace: Path, report: Path) -> int:
        os.chdir("/")
        return trace != tmp_path / "step.json" or report != tmp_path / "step.html"

    launcher = pytest.importorskip("lms.torch.launcher")
    monkeypatch.setattr(launcher, "run", run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert cli.main(["run", "--trace", "step.json", "--report", "step.html", "train.py"]) == 0
