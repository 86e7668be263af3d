"""Files and option lists that were damaged at random: an answer or one line of refusal, never a traceback.

No option list names a device or an absolute path as an output, and each runs in a temporary folder of its own.
"""

from __future__ import annotations

import copy
import io
import json
import os
import random
import re
import secrets
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from lms import cli
from lms.errors import UsageError
from lms.link import catalogue
from lms.link import measure as measuring
from lms.trace import Trace

Document = dict[str, object]

BENCH = Path(__file__).parents[2] / "docs/results/ddl_bench_cpu2_2026-11-28.json"
JUNK: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 0.5, -0.5, 1e-300, 1e300, 10**18, 2**63, 10**30, float("nan"), float("inf"),
    -float("inf"), "", "x", "save", "use", "1e9", "$x_$", "$\\frac$", "\ud800", "a\nb", "\x1b[31m", "\x00", [], {},
    [[]], [1, 2], ["x"], {"x": 1}, [None],
)  # fmt: skip
SCALES = (0, 0.5, 2, 1000, 1e-9, 1e6)
FIGURES = {
    "nbytes", "seconds", "other", "tail", "tail_other", "capacity", "let_go", "out", "back", "latency", "rate", "low",
    "high", "count", "bytes", "bandwidth",
}  # fmt: skip
MOST_SECONDS = 20.0  # of one command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("LMS_")]:
        monkeypatch.delenv(name)
    return tmp_path


def step(traces: ModuleType, base: int) -> Document:
    trace: Trace = traces.chain([60 * 10**6, 10**6, 30 * 10**6] * 3, [0.1, 0.01, 0.05] * 3, base=base)
    link = {"name": "file", "out": 2e9, "back": 1e9, "latency": 1e-4, "source": "measured"}
    document = json.loads(replace(trace, capacity=8 * 10**9, link=link, machine={"script": "train.py"}).to_json())
    assert isinstance(document, dict)
    return document


def documents(traces: ModuleType) -> dict[str, list[Document]]:
    """What `lms` reads: by kind, some examples of each."""
    measured = catalogue.load("gh200")
    bench = json.loads(BENCH.read_text())["runs"]
    records = [one for run in bench for one in run["records"] if one["hosts"] > 1]
    tiers = [{"name": "rank", "size": 2, "bandwidth": 5e9}, {"name": "host", "size": 4, "bandwidth": 25e6}]
    return {
        "trace": [step(traces, base=10**9), step(traces, base=0)],
        "links": [json.loads(measured.to_json()), json.loads(catalogue.load("ac922-4").to_json())],
        "bench": [copy.deepcopy(records[0]) | {"network": {"name": "a switch", "tiers": tiers}}],
    }


COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "trace": (
        ("simulate", "FILE"),
        ("simulate", "FILE", "--limit", "1.2GB", "--records"),
        ("simulate", "FILE", "--budget", "0", "--link", "6/2.1"),
        ("simulate", "FILE", "--frac", "0.15", "--json", "out.json"),
        ("report", "FILE", "-o", "out.html", "--budget", "50MB"),
        ("report", "FILE", "--limit", "1.2GB", "-o", "out.html", "--picture", "out.png"),
        ("link", "compare", "gh200", "pcie-3", "--trace", "FILE"),
    ),
    "links": (
        ("link", "show", "FILE"),
        ("link", "show", "FILE", "--json"),
        ("link", "compare", "FILE", "pcie-3", "--json", "out.json"),
        ("link", "compare", "pcie-3", "FILE", "--trace", "GOOD", "--picture", "out.svg"),
        ("link", "show", "--measured", "FILE"),
    ),
    "bench": (("link", "show", "FILE"), ("link", "compare", "gh200", "FILE", "--picture", "out.png")),
}


def places(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of every value inside a document."""
    children: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


def changed(document: Document, chance: random.Random) -> Document:
    """A copy with one to three values replaced, removed, added or exchanged."""
    document = copy.deepcopy(document)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        found = list(places(document))
        if not found:
            break
        figures = [path for path in found if path[-1] in FIGURES]
        path = chance.choice(figures if chance.random() < 0.4 else found)
        at: object = document
        for key in path[:-1]:
            at = at[key]  # type: ignore[index]
        assert isinstance(at, (dict, list))
        last = path[-1]
        is_number = isinstance(at[last], (int, float)) and not isinstance(at[last], bool)  # type: ignore[index]
        match chance.randrange(4):
            case _ if is_number and last in FIGURES and chance.random() < 0.8:  # often a sound document, if an odd one
                at[last] = type(at[last])(at[last] * chance.choice(SCALES) + chance.choice((0, 0, 1, -1)))  # type: ignore[index]
            case 0:
                del at[last]  # type: ignore[arg-type]
            case 1 if isinstance(at, list):
                at.append(copy.deepcopy(at[last]))  # type: ignore[index]
            case 1:
                at[str(chance.choice(("x", "kind", "nbytes", "format")))] = chance.choice(JUNK)  # type: ignore[index]
            case _:
                at[last] = copy.deepcopy(chance.choice(JUNK))  # type: ignore[index]
    return document


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The bytes with a part cut off, turned over, put in, or another thing altogether."""
    at = chance.randrange(len(content))
    return (
        content[:at],
        content[at:],
        content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :],
        content[:at] + chance.choice((b"\xff", b"\x00", b"{", b"]", b'"', b"9" * 5000)) + content[at:],
        b"[" * 100_000,
        b'{"format":' * 50_000,
        b"",
        b"{}",
        b"\x89PNG\r\n",
    )[chance.randrange(9)]


def outcome(argv: list[str]) -> int:
    """Run a command in this process: its exit status. An exception that is no exit fails, and so does a long wait.

    What is refused is refused in one line of lms, or by the parser of the command line.
    """
    begun = time.monotonic()
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")  # as Python's own stderr
    by_parser = False
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = cli.main(argv)
        except SystemExit as error:
            status, by_parser = int(error.code or 0), True
        out.flush()
        err.flush()
    seconds = time.monotonic() - begun
    said = err.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert seconds < MOST_SECONDS, f"{argv} took {seconds:.0f} s"
    assert "Traceback" not in said, argv
    if status != 0 and not by_parser:
        errors = [line for line in said.splitlines() if not line.startswith("lms: warning:")]
        assert len(errors) == 1, (argv, said)
        assert re.match(r"lms: error: .{10}", errors[0]), (argv, said)
        assert len(errors[0]) < 1000 + 3 * sum(map(len, argv)), (argv, errors[0][:200])
    return status


def campaign(
    count: int, seed: int, one: Callable[[random.Random], tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> dict[str, Counter[int]]:
    """Do `one` so many times, each with chances of its own; the exit statuses by kind. Fails with all that failed."""
    counts: dict[str, Counter[int]] = {}
    failures = []
    for number in range(count):
        try:
            kind, status = one(random.Random(f"{seed}, {number}"))
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[-4:]
            came = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
            failures.append(f"number {number}: {type(error).__name__}: {str(error)[:300]} ({came})")
            continue
        counts.setdefault(kind, Counter())[status] += 1
    with capsys.disabled():
        print(f"\nBASCULE_HOSTILE_SEED={seed}: {len(failures)} of {count} failed")
        for kind, statuses in sorted(counts.items()):
            print(f"  {kind}: {', '.join(f'{times} x exit {status}' for status, times in sorted(statuses.items()))}")
    assert not failures, f"seed {seed}: {len(failures)} of {count} failed:\n" + "\n".join(failures[:20])
    assert sum(sum(statuses.values()) for statuses in counts.values()) == count
    return counts


@pytest.fixture
def seed() -> int:
    """BASCULE_HOSTILE_SEED's, or one of this run's own; the campaign prints it, so that a failure can be run again."""
    return int(os.environ.get("BASCULE_HOSTILE_SEED") or secrets.randbits(32))


def files(
    count: int, seed: int, traces: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]
) -> dict[str, Counter[int]]:
    pytest.importorskip("matplotlib")
    whole = documents(traces)
    (folder / "good.json").write_text(json.dumps(whole["trace"][0]))

    def one(chance: random.Random) -> tuple[str, int]:
        kind = chance.choice(("trace", "trace", "trace", "links", "bench"))
        document = chance.choice(whole[kind])
        if chance.random() < 0.8:
            content = json.dumps(changed(document, chance)).encode()
        else:
            content = damaged(json.dumps(document).encode(), chance)
        (folder / "bad.json").write_bytes(content)
        words = {"FILE": "bad.json", "GOOD": "good.json"}
        argv = [words.get(word, word) for word in chance.choice(COMMANDS[kind])]
        status = outcome(argv)
        assert status in (0, 2, 3), (argv, status)
        return kind, status

    return campaign(count, seed, one, capsys)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:Glyph")  # a name in a script that the picture's font lacks
def test_500_damaged_files(traces: ModuleType, seed: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = files(500, seed, traces, folder, capsys)
    assert sum(statuses[2] for statuses in counts.values()) > 100  # else the damage is none


@pytest.mark.filterwarnings("ignore:Glyph")
def test_some_damaged_files(traces: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files(40, 1, traces, folder, capsys)


# Option lists

SOUND = (
    "run --limit 1GB --min-size 64KB --trace step.json --report page.html train.py --epochs 3",
    "run --budget 0 --swap activations --spill-dir spill --verify -m package.train",
    "run --frac 0.8 --prefetch 2 --write-ahead 1 --host-limit 1GiB train.py",
    "plan --limit 12GB --json limits.json --trace step.json train.py big.toml",
    "simulate good.json --limit 1.2GB --link pcie4x16 --records",
    "simulate good.json --budget 50MB --link 6/2.1 --prefetch 0 --write-ahead 0",
    "simulate good.json --frac 0.2 --json out.json",
    "report good.json -o page.html --limit 1.2GB --picture picture.png",
    "link measure --quick --only memory,file --dir spill -o here.json --name box",
    "link show gh200 --json",
    "link show --measured machine.json --gpu 0 --picture gpus.svg",
    "link compare gh200 machine.json --trace good.json --speedup 20 --json out.json --picture out.svg",
    "--version",
)
VALUES = (
    "", " ", "0", "-1", "1", "2", "1e9", "1e-300", "1e300", "nan", "inf", "-inf", "9223372036854775807",
    "9223372036854775808", "9" * 400, "9" * 5000, "1GB", "1 GB", "1XB", "GB", "0.5", "1.0000001", "-0.1", "1,2",
    ",", "a/b", "1/", "0/0", "1e-300/1", "activations", "optimizer", "activations,activations", "memory", "x", "-",
    "--", "-h", "--help", "-m", "=", "a" * 300, "\udcff", "\u00e9", "x\ny", "$x_$", "good.json", "machine.json",
    "train.py", "missing", "spill", ".", "*", "%s", "{0}", "python",
)  # fmt: skip
OPTIONS = sorted({word for line in SOUND for word in line.split() if word.startswith("-")})


def shuffled(line: str, chance: random.Random) -> list[str]:
    """The option list with one to three words replaced, removed, added, exchanged or cut; the command itself seldom."""
    words = line.split()
    command = 0 if chance.random() < 0.05 else 2 if words[0] == "link" else 1
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if len(words) <= command:
            break
        at = chance.randrange(command, len(words))
        values = [place for place in range(command + 1, len(words)) if words[place - 1].startswith("-")]
        match chance.randrange(10):
            case 0:
                del words[at]
            case 1:
                words.insert(at, chance.choice(OPTIONS))
            case 2:
                words.insert(at, chance.choice(VALUES))
            case 3:
                other = chance.randrange(command, len(words))
                words[at], words[other] = words[other], words[at]
            case 4:
                words[at] = words[at][: chance.randrange(len(words[at]) + 1)]
            case 5 if words[at].startswith("--"):
                words[at] = f"{words[at]}={chance.choice(VALUES)}"
            case 6:
                words[at] = chance.choice(VALUES)
            case _ if values:
                words[chance.choice(values)] = chance.choice(VALUES)
    return words


def is_safe(words: list[str]) -> bool:
    """Whether nothing in the list is, or gives an option, an absolute path or one that leaves the folder."""
    return not any(word.startswith(("/", "-o/")) or "=/" in word or ".." in word for word in words)


@pytest.fixture
def prepared(traces: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that the sound option lists name, and commands that train and measure nothing."""
    pytest.importorskip("matplotlib")
    launcher = pytest.importorskip("lms.torch.launcher")
    monkeypatch.setattr(launcher, "run", lambda *_, **__: 0)
    monkeypatch.setattr(launcher, "record", lambda *_: (0, None, None))

    def measure(folder: Path, **_: object) -> object:
        if not folder.is_dir():
            raise UsageError(f"--dir={str(folder)!r}: no such folder")
        return catalogue.load("gh200")

    monkeypatch.setattr(measuring, "measure", measure)
    return folder


def option_lists(
    count: int, seed: int, traces: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]
) -> Counter[int]:
    work = SimpleNamespace(number=0)

    def one(chance: random.Random) -> tuple[str, int]:
        work.number += 1
        place = folder / str(work.number)
        (place / "spill").mkdir(parents=True)
        os.chdir(place)
        Path("good.json").write_text(json.dumps(step(traces, base=10**9)))
        Path("machine.json").write_text(catalogue.load("ac922-4").to_json())
        Path("train.py").touch()
        while not is_safe(words := shuffled(chance.choice(SOUND), chance)):
            pass
        variable = {}
        if chance.random() < 0.2:
            variable = {f"LMS_{chance.choice(('LIMIT', 'FRAC', 'SWAP', 'VERIFY', 'PREFETCH'))}": chance.choice(VALUES)}
        os.environ.update(variable)
        try:
            return "option lists", outcome(words)
        finally:
            for name in variable:
                del os.environ[name]

    return campaign(count, seed, one, capsys)["option lists"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_500_damaged_option_lists(
    traces: ModuleType, seed: int, prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = option_lists(500, seed, traces, prepared, capsys)
    assert set(counts) <= {0, 1, 2, 3}
    assert counts[0] > 20
    assert counts[2] > 100


def test_some_damaged_option_lists(traces: ModuleType, prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    option_lists(40, 1, traces, prepared, capsys)
