from pathlib import Path

import pytest

from ddl.bench import options
from ddl.launch.errors import UsageError


def test_what_is_not_the_benchs_own_is_ddlruns() -> None:
    asked = options.parse(["--compare", "-H", "a:2,b:2", "--sizes", "25MiB", "-m", "r:2x2", "--rounds", "2"])
    assert asked is not None
    assert (asked.compare, asked.sizes, asked.rounds) == (True, (25 << 20,), 2)
    assert (asked.launch.hosts, str(asked.launch.mode)) == ("a:2,b:2", "r:2x2")


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1KiB..64KiB", (1 << 10, 4 << 10, 16 << 10, 64 << 10)),
        ("1KiB..20KiB", (1 << 10, 4 << 10, 16 << 10, 20 << 10)),
        ("6,1024", (4, 1024)),  # whole float32
    ],
)
def test_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert options.sizes(text) == sizes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sizes", "3x"], "expected a size"),
        (["--sizes", "1MiB..1KiB"], "the smaller size first"),
        (["--rounds", "0"], "a whole number, 1 or more"),
        (["--seconds", "-1"], "seconds above 0"),
        (["--seconds", "x"], "'x': expected seconds above 0"),
        (["--nonsense"], "--nonsense: unknown option"),
        (["--compare", "--only", "["], r"argument --only: '\[': expected a regular expression"),
        (["--only", "gloo"], "--only is about the peers, which are timed with --compare; add it"),
        (["--peer-mpi", "/mpirun"], "--peer-mpi is about the peers"),
        (["--json", "/no/such/a.json"], "argument --json: '/no/such/a.json': there is no folder /no/such"),
        (["--plot", "/no/such/a.svg"], "argument --plot: '/no/such/a.svg': there is no folder /no/such"),
        (["--dry-run"], "--dry-run is not for the benchmark: a benchmark runs"),
        (["--restarts", "2"], "--restarts is not for the benchmark"),
        (["-rank-prefix"], "--rank-prefix is not for the benchmark"),
        (["--log-dir", "logs"], "--log-dir is not for the benchmark: .* --json FILE keeps every figure"),
        (["train.py", "x"], "runs no program, and was given 'train.py x'"),
    ],
)
def test_wrong_options_say_what_is_expected(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options.parse(words)


def test_a_network_is_read_as_ddlrun_plan_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "network.toml"
    path.write_text('[[tiers]]\nsize = 4\nbandwidth = "200mbit"\n')
    asked = options.parse(["--network", str(path)])
    assert asked is not None
    assert asked.network is not None
    assert asked.network.levels[0].bandwidth == 25e6
