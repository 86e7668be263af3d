import re
from pathlib import Path

import pytest

from ddl.launch import options
from ddl.launch.errors import UsageError
from ddl.launch.options import Export, Mode, Options


def parse(words: list[str]) -> Options:
    asked = options.parse(words)
    assert asked is not None
    return asked


def test_options_have_one_dash_or_two() -> None:
    assert parse(["-np", "4", "prog"]) == parse(["--np", "4", "prog"]) == parse(["--np=4", "prog"])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("-H a,b", "--host a,b"),
        ("-hostfile f", "--hostfile f"),
        ("-m r", "-mode r"),
        ("-rf f", "--rankfile f"),
        ("-ddlarg -a -ddlarg x", "-ddloption -a -ddloption x"),
        ("-v", "--verbose"),
        ("-np 2", "-n 2"),
    ],
)
def test_the_original_s_two_spellings_of_an_option_mean_the_same(one: str, other: str) -> None:
    assert parse([*one.split(), "prog"]) == parse([*other.split(), "prog"])


def test_the_first_word_that_is_no_option_is_the_program_and_the_rest_is_its_own() -> None:
    assert parse(["-np", "2", "python", "train.py", "-np", "8", "--verbose"]) == Options(
        ranks=2, program=("python", "train.py", "-np", "8", "--verbose")
    )


def test_after_two_dashes_comes_the_program_whatever_it_is_called() -> None:
    assert parse(["-v", "--", "doctor"]).program == ("doctor",)
    assert parse(["--", "--strange"]).program == ("--strange",)


def test_a_program_s_own_help_is_not_ours() -> None:
    assert parse(["python", "train.py", "--help"]).program[-1] == "--help"


def test_every_option_is_read() -> None:
    line = (
        "-H a:2,b -np 4 -m bnrr:2x2x1x1 --accelerators 2 --nodes 1 --racks 2 --aisles 1 -rf r -tcp --mpiarg='--foo bar'"
        " --mpiarg=-q --ddlarg '-dbg_level 1' --no_ddloptions -x A -x B=c=d --skipchecks -v --dry-run --rank-prefix"
        " --restarts 3 --order hosts --log-dir logs --mpirun /m --start-timeout 900 prog a"
    )
    words = [word.strip("'") for word in re.findall(r"(?:[^\s']|'[^']*')+", line)]
    words = [word.replace("'", "") for word in words]
    assert parse(words) == Options(
        hosts="a:2,b",
        ranks=4,
        mode=Mode("bnrr", (2, 2, 1, 1)),
        accelerators=2,
        nodes=1,
        racks=2,
        aisles=1,
        rankfile=Path("r"),
        tcp=True,
        mpiargs=("--foo", "bar", "-q"),
        ddlargs=("-dbg_level", "1"),
        no_ddloptions=True,
        exports=(Export("A"), Export("B", "c=d", secret=True)),
        skipchecks=True,
        verbose=True,
        dry_run=True,
        rank_prefix=True,
        restarts=3,
        order="hosts",
        log_dir=Path("logs"),
        mpirun=Path("/m"),
        start_timeout=900,
        program=("prog", "a"),
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "PROGRAM: none given"),
        ("-H a -host", "-host: expected a value after it: -host HOST[:SLOTS],..."),
        ("-H= prog", "argument -H/--host/--hosts: the value is empty"),
        ("-np", "-np: expected a value after it: -np N"),
        ("-np 0 prog", "argument -np/-n: '0': expected a whole number, 1 or more"),
        ("-np x prog", "argument -np/-n: 'x': expected a whole number"),
        ("--restarts -1 prog", "argument --restarts: '-1': expected a whole number, 0 or more"),
        ("-m q prog", "argument -m/--mode: 'q': unknown mode 'q'; expected b"),
        ("-m c prog", "argument -m/--mode: 'c': mode c (RCS) of the original is not built"),
        ("-m rr prog", "2 modes for 4 dimensions"),
        ("-m bn:2x2x2 prog", "2 modes for 3 dimensions"),
        ("-m r:2x0 prog", "expected dimensions, such as p:4x2x1x1: expected a whole number, 1 or more"),
        ("-m r:2x prog", "expected dimensions, such as"),
        ("-order up prog", "argument --order: invalid choice: 'up' (choose from"),
        ("-verbos prog", "-verbos: unknown option; did you mean --verbose?"),
        ("-zzzz prog", "-zzzz: unknown option; `ddlrun --help` lists them"),
        ("-v=1 prog", "-v takes no value"),
        ("-x 1A prog", "argument -x: '1A': not a variable name; expected VAR or VAR=VALUE"),
        ("-x = prog", "expected VAR or VAR=VALUE"),
        ("-H a -hostfile f prog", "-H and -hostfile: both name the hosts"),
        ("doctor prog", "ddlrun doctor runs no program, and was given 'prog'"),
    ],
)
def test_a_wrong_command_line_is_named_with_what_is_allowed(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(line.split())


def test_an_argument_of_mpirun_that_is_no_shell_word_is_named() -> None:
    with pytest.raises(UsageError, match=r"argument --mpiarg/.*not words of a shell"):
        parse(["--mpiarg", "'a", "prog"])


def test_doctor_takes_the_options_before_it_and_after_it() -> None:
    assert parse(["-v", "doctor", "-H", "a"]) == Options(command="doctor", hosts="a", verbose=True)


def test_one_letter_stands_for_all_dimensions() -> None:
    assert str(parse(["-m", "r", "prog"]).mode) == "r"
    assert str(parse(["-m", "bnrr", "prog"]).mode) == "bnrr"
    assert str(parse(["-m", "p:4x2x1x1", "prog"]).mode) == "p:4x2x1x1"


def test_help_lists_every_option_within_the_width_of_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    for spelled in ("--help", "-help", "-h"):
        assert options.parse([spelled]) is None
    text = capsys.readouterr().out
    for name in ("-H", "-hostfile", "--tcp", "-n", "-rf", "--rankfile", "-m", "--ddlarg", "-x", "--log-dir"):
        assert re.search(rf"^  .*(?<![\w-]){name}\b", text, re.MULTILINE), name
    assert max(map(len, text.splitlines())) <= 120
