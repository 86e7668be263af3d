"""`lms run` and `lms plan`: somebody's script, unchanged, in a process that is set up for it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import cap
import pytest

import lms
from lms.core.link import Link
from lms.core.plan import Plan
from lms.core.schedule import Swap
from lms.core.simulate import Forecast
from lms.core.trace import Access, Tensor
from lms.options import Options
from lms.target import Target
from lms.torch import launcher
from lms.torch.launcher import OVER_LIMIT, missing_environment
from lms.trace import Trace

pytest.importorskip("torch")

SOURCE = str(Path(lms.__file__).parents[1])
ENVIRONMENT = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

# A network that saves 16 records of 1 MB. Its arguments: passes, and what to do after them.
TRAIN = """
import sys

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(16)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.randn(1024, 256)
try:
    for step in range(int(sys.argv[1])):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item().hex())
except Exception:
    print("the script saw an exception")
    raise
finally:
    print("the script's own end")
exec(compile(" ".join(sys.argv[2:]), "<end>", "exec"))
"""


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def environment(**extra: str) -> dict[str, str]:
    """This process's environment, without what a launcher above us may have set."""
    own = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT and not name.startswith("LMS_")}
    return own | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"} | extra


def python(*argv: str | Path, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run python as a user would."""
    return subprocess.run(
        [sys.executable, *map(str, argv)],
        capture_output=True, text=True, check=False, env=environment(**extra), cwd=cwd,
    )  # fmt: skip


Lms = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run_lms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lms]:
    """`run_lms("run", "train.py")`: what `python -m lms run train.py` does, in a fork of a process that has PyTorch."""
    folder = tmp_path_factory.mktemp("said")
    files = {name: folder / name for name in ("stdout", "stderr")}
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("lms_forks.py"))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
    ) as server:  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None

        def run(*argv: str | Path, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
            for file in files.values():
                file.write_text("")
            request = {"argv": [*map(str, argv)], "cwd": str(cwd or Path.cwd()), "environment": environment(**extra)}
            server.stdin.write(json.dumps(request | {name: str(file) for name, file in files.items()}) + "\n")
            server.stdin.flush()
            status = int(server.stdout.readline())
            return subprocess.CompletedProcess(argv, status, **{name: file.read_text() for name, file in files.items()})

        yield run
        server.stdin.close()


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What LMS said; there must be nothing else on stderr."""
    lines = done.stderr.splitlines()
    assert all(line.startswith("lms: ") for line in lines), done.stderr
    return [line.removeprefix("lms: ") for line in lines]


def test_nothing_of_a_framework_is_loaded_before_the_process_is_set_up() -> None:
    done = python("-c", "import sys, lms.cli, lms.torch.launcher; print({'torch', 'numpy'} & set(sys.modules))")
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_a_limit_above_the_control_groups_is_refused_before_the_script_runs(train: Path) -> None:
    if cap.method() == "RLIMIT_DATA":
        pytest.skip("no cgroup can be made here")
    argv = [sys.executable, "-m", "lms", "run", "--limit", "2GB", str(train), "3"]
    done = cap.run(argv, limit_bytes=10**9, env=environment())
    assert (done.returncode, done.killed, done.stdout) == (2, False, "")
    said = r"lms: error: limit 2 GB: this process may use 1 GB .*give at most 900 MB"
    assert re.search(said, done.stderr), done.stderr


def test_what_the_user_set_in_the_environment_stays() -> None:
    assert missing_environment({}) == ENVIRONMENT
    assert missing_environment(ENVIRONMENT) == {}
    assert missing_environment({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}) == {}


def test_a_plan_that_was_made_anew_says_what_had_drifted_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    announce = launcher._announcer()
    plan = Plan(moves=(Swap(0, 0, 3, 2, True),), cap=(0,) * 4, forecast=Forecast(2, 0, 0, 1, 1, 9, 9, 9, 9, 0))
    announce(plan)
    assert capsys.readouterr().err.startswith("lms: plan: ")
    announce(replace(plan, drift="computation takes 2.00 x as long"))
    assert capsys.readouterr().err == "lms: planned anew: computation takes 2.00 x as long\n"


def test_a_script_prints_what_it_prints_without_lms_and_stderr_says_what_was_done(train: Path, tmp_path: Path) -> None:
    plain = python(train, "3")
    trace, report, ran = tmp_path / "out" / "step.json", tmp_path / "out" / "step.html", tmp_path / "out" / "ran.json"
    stats = tmp_path / "out" / "stats.json"
    files = ("--trace", trace, "--report", report, "--perfetto", ran, "--stats", stats)
    done = python("-m", "lms", "run", "--budget", "4MB", *files, train, "3")
    assert (done.returncode, done.stdout) == (0, plain.stdout)
    first, plan, summary, *written = said(done)
    assert re.fullmatch(r"swapping activations from cpu to file.*4 MB.*\(budget given\)", first)
    assert re.match(r"plan: .*[1-9]\S* MB go out and \S+ MB come back", plan)
    assert re.match(r"3 steps, 3 passes, .* swapped \d+\S* MB out", summary)
    assert written == [f"wrote {path}" for path in (stats, trace, report, ran)]
    figures = json.loads(stats.read_text())
    assert (figures["steps"], figures["budget"]) == (3, 4_000_000)
    assert Trace.load(trace).saved >= 15 * 1024 * 1024
    assert Trace.load(trace).link
    assert "LMS, measured" in report.read_text()
    assert "<h1>train.py</h1>" in report.read_text()
    assert Trace.load(trace).machine["script"] == "train.py"
    drawn = json.loads(ran.read_text())
    assert drawn["otherData"]["lms"] == "measured"
    slices = [event for event in drawn["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in slices} == {1, 2, 3, 4}, "the pass, copies out, copies back, waiting"
    assert {"pass", "forward", "backward", "0", "0.1"} <= {event["name"] for event in slices}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in slices)
    copies = [event for event in slices if event["tid"] in (2, 3)]
    assert all(event["args"]["bytes"] == 1 << 20 and event["args"]["reason"] for event in copies)
    counters = {event["name"] for event in drawn["traceEvents"] if event["ph"] == "C"}
    assert counters == {"held", "allowed by the plan", "memory of the process"}


LOOK = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "doc": __doc__,
    "utf8": sys.flags.utf8_mode,
    "main": sys.modules["__main__"].__dict__ is globals(),
}))
"""


# What `lms run` does when all is set up, without the seconds that PyTorch and a session take to begin.
EXECUTE = """
import sys
from lms.target import Target, execute

module = sys.argv[1] == "-m"
sys.exit(execute(Target(sys.argv[1 + module], tuple(sys.argv[2 + module:]), is_module=module)))
"""


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """The same program as a script, a linked script, a module and a folder."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "package").mkdir(parents=True)
    for path in ("look.py", "elsewhere/look.py", "elsewhere/__main__.py", "elsewhere/package/__main__.py"):
        (tmp_path / path).write_text(f'"""doc"""{LOOK}')
    (elsewhere / "package" / "__init__.py").touch()
    (tmp_path / "link.py").symlink_to(elsewhere / "look.py")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "argv", "cwd"),
    [
        ([], ["look.py"], "."),
        ([], ["elsewhere/look.py"], "."),
        ([], ["link.py"], "."),
        ([], ["-m", "package"], "elsewhere"),
        ([], ["{places}/elsewhere"], "."),
        (["-P"], ["look.py"], "."),
    ],
    ids=["script", "script elsewhere", "link", "module", "folder", "safe path"],
)
def test_a_program_sees_what_python_would_have_shown_it(
    options: list[str], argv: list[str], cwd: str, places: Path
) -> None:
    given = [*(part.format(places=places) for part in argv), "--limit", "x y", "--", "-m"]
    plain = python(*options, *given, cwd=places / cwd)
    done = python(*options, "-c", EXECUTE, *given, cwd=places / cwd)
    assert (plain.returncode, done.returncode, done.stderr) == (0, 0, "")
    assert json.loads(done.stdout) == json.loads(plain.stdout)


def test_options_of_python_and_arguments_of_the_script_are_its_own(places: Path) -> None:
    given = ["look.py", "--limit", "x y", "--", "-m"]
    plain = python("-X", "utf8", *given, cwd=places)
    done = python("-X", "utf8", "-m", "lms", "run", *given, cwd=places)
    assert json.loads(done.stdout) == json.loads(plain.stdout)


@pytest.mark.parametrize("own", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:4"}])
def test_a_script_finds_the_environment_that_is_best_and_the_users(
    run_lms: Lms, own: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "show.py"
    script.write_text("import os; print(sorted(os.environ.items()))")
    done = run_lms("run", script, **own)
    shown = dict(eval(done.stdout))
    assert shown.items() >= {**ENVIRONMENT, **own}.items()
    assert not [name for name in shown if "LMS" in name]


@pytest.mark.parametrize(("end", "status"), [("sys.exit(7)", 7), ("raise KeyboardInterrupt", 130)])
def test_a_scripts_own_exit_passes(run_lms: Lms, end: str, status: int, train: Path) -> None:
    done = run_lms("run", train, "1", end)
    assert done.returncode == status
    assert said(done)[-1].startswith("1 step, 1 pass, ")


@pytest.mark.parametrize("end", ["raise SystemExit", "raise SystemExit('words')", "x = = 1", "None.nothing"])
def test_a_program_ends_as_under_python(end: str, tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(f"def fail():\n    {end}\nfail()\n")
    plain, done = python(script), python("-c", EXECUTE, script)
    assert (done.returncode, done.stderr) == (plain.returncode, plain.stderr)


def test_a_scripts_exception_is_shown_as_python_shows_it_and_what_was_recorded_is_written(
    run_lms: Lms, train: Path, tmp_path: Path
) -> None:
    end = "def fail(): raise RuntimeError('mine')\nfail()"
    trace = tmp_path / "step.json"
    plain = python(train, "1", end)
    done = run_lms("run", "--trace", trace, train, "1", end)
    assert done.returncode == plain.returncode == 1
    own = [line for line in done.stderr.splitlines() if not line.startswith("lms: ")]
    assert own == plain.stderr.splitlines()
    assert Trace.load(trace).records


def test_a_module_that_is_not_there_is_a_usage_error(run_lms: Lms) -> None:
    done = run_lms("run", "-m", "no.such.module")
    assert done.returncode == 2
    assert said(done)[-1].startswith("error: -m no.such.module: no module of that name")


def test_a_script_that_never_trains_is_told_that_lms_had_no_effect(run_lms: Lms, tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text("print('hello')")
    trace = tmp_path / "step.json"
    done = run_lms("run", "--trace", trace, script)
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert any(line.startswith("warning: LMS had no effect") for line in said(done))
    assert any(line.startswith(f"warning: --trace={str(trace)!r}: nothing written") for line in said(done))
    assert not trace.exists()


def test_an_error_of_lms_inside_a_script_is_one_line_and_its_exit_status(run_lms: Lms, tmp_path: Path) -> None:
    script = tmp_path / "nested.py"
    script.write_text("import lms\nwith lms.LMS(budget=0): pass\n")
    done = run_lms("run", script)
    assert done.returncode == 2
    assert re.match(r"error: .*do not nest", said(done)[-1])


def test_a_limit_below_the_floor_ends_the_script_before_its_second_step(run_lms: Lms, train: Path) -> None:
    done = run_lms("run", "--limit", "50MB", train, "5")
    assert done.returncode == 3
    assert re.match(r"error: limit 50 MB is below the floor of \d+ MB", said(done)[-1])
    assert len(said(done)) == 2
    assert "\n1 " not in done.stdout


ADAM = """
import sys

import torch

torch.manual_seed(0)
layers = (torch.nn.Sequential(torch.nn.Linear(640, 640), torch.nn.GELU()) for _ in range(12))
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters())
parts, to_none = int(sys.argv[1]), sys.argv[2] == "none"
for step in range(5):
    for _ in range(parts):
        model(torch.randn(1024, 640)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=to_none)
"""


@pytest.mark.alone
@pytest.mark.parametrize(
    ("parts", "gradients"),
    [(1, "none"), pytest.param(1, "zero", marks=pytest.mark.slow), pytest.param(3, "none", marks=pytest.mark.slow)],
)
def test_the_limit_holds_once_the_optimizers_state_exists(
    run_lms: Lms, parts: int, gradients: str, tmp_path: Path
) -> None:
    script, limits = tmp_path / "adam.py", tmp_path / "limits.json"
    script.write_text(ADAM)
    assert run_lms("plan", "--json", limits, script, "1", "zero").returncode == 0
    needed = json.loads(limits.read_text())
    limit = (needed["floor"] + needed["plain_peak"]) // 2
    done = run_lms("run", "--limit", str(limit), script, str(parts), gradients)
    assert done.returncode == 0, said(done)
    line = said(done)[-1]
    peak = re.search(r"peak ([\d.]+) MB \((.*?)\) of", line)
    assert peak is not None, line
    assert float(peak.group(1)) * 1e6 <= 1.005 * limit, line
    assert re.search(r"swapped [\d.]+ [MG]B out", line), line
    # Below the floor that the state makes, the plain limit of the first pass is no excuse.
    done = run_lms("run", "--limit", str(needed["floor"] - 15_000_000), script, str(parts), gradients)
    assert done.returncode == 3, said(done)
    assert "Raise the limit to" in said(done)[-1]


STATE = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(1280, 1280), torch.nn.GELU()) for _ in range(12)))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(32, 1280)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
"""


@pytest.mark.alone
@pytest.mark.parametrize(
    ("kinds", "state", "less"),
    [
        ("optimizer", 157, 60),
        pytest.param("activations,optimizer", 157, 60, marks=pytest.mark.slow),
        pytest.param("activations,parameters,gradients", 157, 70, marks=pytest.mark.slow),
        ("activations,optimizer,parameters,gradients", 315, 120),
    ],
)
def test_the_limit_holds_with_state_that_does_not_fit(
    run_lms: Lms, kinds: str, state: int, less: int, tmp_path: Path
) -> None:
    (script := tmp_path / "state.py").write_text(STATE)
    roomy = run_lms("run", "--swap", kinds, script)
    assert roomy.returncode == 0, said(roomy)
    found = re.search(rf"peak ([\d.]+) MB .*{state} MB of {state} MB of state stay, 0 B went out", said(roomy)[-1])
    assert found is not None, said(roomy)
    limit = int(float(found[1]) * 1e6) - less * 1_000_000
    done = run_lms("run", "--swap", kinds, "--limit", str(limit), script)
    assert done.returncode == 0, said(done)
    peak = re.search(rf"peak ([\d.]+) MB .* of {state} MB of state stay, [\d.]+ [MG]B went out", said(done)[-1])
    assert peak is not None, said(done)
    assert float(peak[1]) * 1e6 <= 1.005 * limit
    assert done.stdout == roomy.stdout


GROWING = """
import torch

model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for step in range(12):
    model(torch.randn(256, 256)).square().mean().backward()
    optimizer.step()
    if step == 8:
        kept.append(bytearray(b"x" * 600_000_000))
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)"])
def test_memory_that_grows_late_is_a_warning_and_a_status_of_its_own(run_lms: Lms, end: str, tmp_path: Path) -> None:
    script = tmp_path / "growing.py"
    script.write_text(GROWING + end)
    done = run_lms("run", "--limit", "600MB", script)
    assert done.returncode == OVER_LIMIT
    line = done.stderr.splitlines()[-1]
    assert "12 steps" in line
    assert re.search(r"peak [\d.]+ [MG]B \(after pass 9, outside forward and backward\) of 600 MB allowed", line)
    assert "more than the limit of 600 MB" in done.stderr


def test_a_graph_that_stays_open_does_not_make_the_last_line_wrong(run_lms: Lms, tmp_path: Path) -> None:
    script = tmp_path / "open.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))\n"
        "loss = model(torch.randn(1024, 256)).square().mean()\n"
        "torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)\n"
    )
    done = run_lms("run", "--budget", "0", script)
    assert done.returncode == 0
    assert re.search(r"warning: there is no plan: [\d.]+ MB were saved .* a graph is kept open", said(done)[-1])


def test_plan_stops_the_script_after_two_steps_and_answers(run_lms: Lms, train: Path, tmp_path: Path) -> None:
    document, trace = tmp_path / "limits.json", tmp_path / "step.json"
    done = run_lms("plan", "--json", document, "--trace", trace, train, "1000000")
    assert done.returncode == 0, done.stderr
    own = [line for line in done.stdout.splitlines() if re.match(r"\d+ -?0x|the script", line)]
    assert 2 <= len(own) <= 4
    assert own[-1] == "the script's own end"  # its finally blocks are run, its except blocks are not
    for fact in ("unswapped", "floor", "may stay"):
        assert re.search(rf"^ *{fact}", done.stdout, re.MULTILINE)
    rows = json.loads(document.read_text())["limits"]
    assert rows[0]["moved"] == 0
    assert rows[-1]["moved"] > 0
    assert rows[-1]["peak"] < rows[0]["peak"]
    assert Trace.load(trace).link
    simulated = run_lms("simulate", trace)
    assert simulated.stdout in done.stdout


def test_the_step_has_the_scratch_memory_of_whichever_pass_needed_more() -> None:
    accesses = (Access("write", 0, 1.0, other=300), Access("read", 0, 1.0, other=500))
    step = Trace((Tensor(10, freed=2),), accesses, tail_other=300)
    first = step.with_measured([9.0] * 3, [200, 540, 200])
    assert launcher._with_more(step, first) == step.with_measured(step.times, [300, 540, 300])
    other = Trace((Tensor(99, freed=2),), accesses, tail_other=900)
    assert launcher._with_more(step, other) == launcher._with_more(step, None) == step, "it is no pass like this one"


# Few bytes are saved, and Adam's step needs more than forward and backward do.
HEAVY_STEP = """
import sys

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(),
    torch.nn.Linear(16 * 32 * 32, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512), torch.nn.Tanh(),
)
optimizer = torch.optim.Adam(model.parameters())
for step in range(int(sys.argv[1])):
    model(torch.randn(8, 3, 32, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_lowest_limit_of_the_table_holds_in_the_optimizers_step_too(run_lms: Lms, tmp_path: Path) -> None:
    script, document, stats = tmp_path / "train.py", tmp_path / "limits.json", tmp_path / "stats.json"
    script.write_text(HEAVY_STEP)
    assert run_lms("plan", "--json", document, script, "9").returncode == 0
    answer = json.loads(document.read_text())
    assert answer["floor_module"] == "the time between two passes"
    lowest = answer["limits"][-1]["limit"]
    done = run_lms("run", "--limit", str(lowest), "--stats", stats, script, "4")
    assert done.returncode == 0, done.stderr
    assert json.loads(stats.read_text())["peak"] <= lowest * (1 + 1 / 256), "the reserve of plans"


# Evaluates, and then trains and waits for its data. Its arguments: passes a step, and seconds of waiting in each.
LOOP = """
import sys, threading

import torch

passes, wait, optimizer = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:] != ["no optimizer"]
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer else None
batch = torch.randn(1024, 256)
for _ in range(3):
    model(batch).square().mean().item()  # without no_grad
for step in range(1000000):
    for _ in range(passes):
        threading.Event().wait(wait)
        model(batch).square().mean().backward()
    if optimizer:
        optimizer.step()
    print("step", flush=True)
"""


@pytest.mark.parametrize("passes", [1, 3])
def test_plan_tells_the_step_with_its_waiting_and_its_passes(run_lms: Lms, passes: int, tmp_path: Path) -> None:
    script, document, file = tmp_path / "loop.py", tmp_path / "limits.json", tmp_path / "step.json"
    script.write_text(LOOP)
    done = run_lms("plan", "--json", document, "--trace", file, script, str(passes), "0.3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("step") == 1, "it is stopped at its second step"
    trace, limits = Trace.load(file), json.loads(document.read_text())
    read = [trace.positions(index, "read") for index in range(len(trace.tensors))]
    assert all(read), "of the training, and not of the evaluation"
    assert trace.passes == passes
    assert trace.cycle - trace.busy >= 0.25 * passes
    assert trace.cycle >= passes * (0.25 + trace.seconds)
    assert limits["limits"][0]["seconds"] == limits["cycle"] == trace.cycle
    assert re.search(
        r"^step .* from one optimizer step to the next; the device computed for", done.stdout, re.MULTILINE
    )


def test_plan_of_a_script_without_an_optimizer_speaks_of_passes(run_lms: Lms, tmp_path: Path) -> None:
    script, document = tmp_path / "loop.py", tmp_path / "limits.json"
    script.write_text(LOOP)
    done = run_lms("plan", "--json", document, script, "1", "0", "no optimizer")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("step") == 2
    assert json.loads(document.read_text())["cycle"] is None
    assert re.search(r"^pass .* the step around it was not measured$", done.stdout, re.MULTILINE)


def test_plan_says_so_when_the_script_ends_before_one_pass(run_lms: Lms, tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text("print('hello')")
    done = run_lms("plan", script)
    assert done.returncode == 1
    assert "ended too early: nothing of min-size" in said(done)[-1]


def test_plan_passes_on_the_failure_of_a_script(run_lms: Lms, tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("raise RuntimeError('mine')")
    done = run_lms("plan", script)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: mine")
    assert "may stay" not in done.stdout


COMPILED = """
import sys, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x
net = Net()
net.compile(backend="aot_eager")
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(6):
    net(torch.randn(512, 64)).sum().backward()
    optimizer.step()
print("steps", step + 1)
"""


def test_a_compiled_module_is_recorded_whole(run_lms: Lms, tmp_path: Path) -> None:
    script, trace = tmp_path / "train.py", tmp_path / "step.json"
    script.write_text(COMPILED)
    done = run_lms("plan", "--trace", trace, script)
    assert done.returncode == 0, done.stderr
    assert "steps" not in done.stdout, "it was ended after the passes to be watched"
    assert Trace.load(trace).saved == 5 * 512 * 64 * 4, "the input, and what each block returns"


SUBCLASS = """
import torch
class Named(torch.Tensor):
    pass
x = torch.randn(512, 512).as_subclass(Named)
w = torch.ones((), requires_grad=True)
(x * w).sum().backward()
"""


def test_what_could_not_be_swapped_is_told_with_its_reason(run_lms: Lms, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SUBCLASS)
    done = run_lms("run", "--budget", "0", script)
    assert done.returncode == 0, done.stderr
    assert "1.05 MB of tensors that are more than plain bytes" in said(done)[-1]


def test_modules_are_named_as_parts_of_the_model(run_lms: Lms, tmp_path: Path) -> None:
    script, trace = tmp_path / "train.py", tmp_path / "step.json"
    script.write_text(COMPILED.replace("net.compile", "0 and net.compile").replace("torch.tanh(block(x))", "block(x)"))
    done = run_lms("run", "--budget", "0", "--trace", trace, script)
    assert done.returncode == 0, done.stderr
    assert {f"blocks.{n}" for n in range(4)} <= {record.module for record in Trace.load(trace).records}


@pytest.mark.parametrize("files", [6, 7])
def test_too_few_open_files_are_one_line_of_lms(train: Path, files: int) -> None:
    limited = f"import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))"
    command = f"{limited}; from lms.cli import main; sys.exit(main())"
    done = python("-c", command, "run", "--budget", "4MB", train, "3")
    assert done.returncode in (1, 2, 4)
    assert "Traceback" not in done.stderr
    (line,) = [line for line in said(done) if line.startswith("error: ")]
    assert "Too many open files" in line
    assert "raise the limit of open files (ulimit -n)" in line


@pytest.mark.usefixtures("one_thread")
def test_a_runs_last_lines_have_the_advice(
    train: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lms.advice.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("lms.advice.STALLED", 0.0)  # however quick the disk is
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    for name in [name for name in os.environ if name.startswith("LMS_")]:
        monkeypatch.delenv(name)
    launcher.run(Target(str(train), ("20",)), Options.parse(budget="2MB"))
    _, _, last = capfd.readouterr().err.partition("20 steps")
    assert re.search(r"\nlms: advice: \d+% of the time .* raise --budget, now 2 MB,", last)


def test_plan_and_run_say_which_modules_are_recomputed_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    block = "nn.Sequential(nn.Linear(64, 256), nn.Sigmoid(), nn.Linear(256, 64))"
    script = tmp_path / "train.py"
    script.write_text(
        "import torch; from torch import nn\n"
        f"model = nn.Sequential(*({block} for _ in range(6)))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(8):\n"
        "    model(torch.randn(512, 64)).square().mean().backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    monkeypatch.setattr("lms.runtime.plan_maker.PlanMaker.link", lambda _: Link("slow", 1e3, 1e3))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    for name in [name for name in os.environ if name.startswith("LMS_")]:
        monkeypatch.delenv(name)
    options = Options.parse(budget="1MB", recompute=True)
    _, step, _ = launcher.record(Target(str(script), ()), options)
    planned = capfd.readouterr().err
    assert re.search(r"\nlms: recomputed: \d modules: a pass computes for .* with these recomputed\n", planned)
    assert re.search(r"\nlms: recomputed: \d: running it again takes .*; copies of the 524 KB that it saves, ", planned)
    assert step is not None
    assert step.saved < 6 * 512 * (64 + 256) * 4, "it is a step in which they are"
    launcher.run(Target(str(script), ()), options)
    assert "lms: recomputed: " in capfd.readouterr().err
