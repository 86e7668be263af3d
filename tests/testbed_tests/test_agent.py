import subprocess
import sys

import pytest

from testbed import AGENT, Testbed, cluster, running

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_testbed")]


def test_it_runs_a_line_of_shell_on_the_host_that_is_named(bed: Testbed) -> None:
    done = bed.run("h0", [AGENT, "-x", "-o", "BatchMode=yes", "root@h2", "hostname;", "echo", "$((6 * 7))"], check=True)
    assert done.stdout == "h2\n42\n"


def test_the_exit_status_is_the_commands(bed: Testbed) -> None:
    assert bed.run("h0", [AGENT, "h1", "exit 7"]).returncode == 7


def test_nothing_of_the_callers_environment_comes_along_as_with_ssh(bed: Testbed) -> None:
    done = bed.run("h0", [AGENT, "h1", "pwd; env"], env={"SECRET": "1"}, cwd="/", check=True)
    assert "SECRET" not in done.stdout
    assert done.stdout.splitlines()[0] == bed.run("h0", ["sh", "-c", "echo $HOME"]).stdout.strip()


def test_input_and_output_pass_through(bed: Testbed) -> None:
    with bed.popen("h0", [AGENT, "h3", "tr a-z A-Z"]) as process:
        assert process.communicate("hello") == ("HELLO", "")


def test_it_works_from_a_host_that_was_entered_with_it(bed: Testbed) -> None:
    assert bed.run("h0", [AGENT, "h1", f"{AGENT} h2 hostname"]).stdout == "h2\n"


@pytest.mark.parametrize("host", ["h9", "example"])
def test_a_host_that_does_not_exist_is_unreachable_in_one_line(bed: Testbed, host: str) -> None:
    done = bed.run("h0", [AGENT, host, "hostname"])
    assert done.returncode == 255
    assert done.stderr.count("\n") == 1
    assert f"{host!r}: there is none of this name; the hosts are h0 h1 h2 h3" in done.stderr


def test_what_is_cut_or_killed_cannot_be_reached_and_the_rest_can() -> None:
    with running(cluster([2, 2])) as bed:
        bed.cut("h1")
        assert "the link of h1 is cut" in bed.run("h0", [AGENT, "h1", "hostname"]).stderr
        bed.mend("h1")
        bed.cut("rack1")
        assert "the link of rack1 is cut" in bed.run("h0", [AGENT, "h2", "hostname"]).stderr
        assert bed.run("h0", [AGENT, "h1", "hostname"], check=True).stdout == "h1\n"
        assert bed.run("h2", [AGENT, "h3", "hostname"], check=True).stdout == "h3\n"
        bed.kill("h1")
        done = bed.run("h0", [AGENT, "h1", "hostname"])
        assert done.returncode == 255
        assert "it was killed" in done.stderr


def test_outside_of_a_testbed_it_says_what_to_do() -> None:
    done = subprocess.run([sys.executable, AGENT, "h0", "hostname"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 255
    assert "this is no host of a testbed" in done.stderr
