"""What is read without running a container."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddl.launch import hosts

ROOT = Path(__file__).parents[3]
FILES = ROOT / "envs/images"
TOOLS = ROOT / "out/tools"


def test_the_containerfile_passes_hadolint() -> None:
    if not (TOOLS / "pins").exists():
        pytest.skip("hadolint is missing: ci/chart_tools puts it into out/tools")
    done = subprocess.run(
        [TOOLS / "bin/hadolint", "--failure-threshold", "style", "Containerfile"],
        cwd=FILES,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_the_entry_point_is_a_script_of_the_plain_shell_and_passes_shellcheck() -> None:
    script = FILES / "files/usr/local/bin/bascule-host"
    assert script.read_text().startswith("#!/bin/sh\n")
    assert script.stat().st_mode & 0o111 == 0o111
    if not (program := TOOLS / "bin/shellcheck").exists():
        pytest.skip("shellcheck is missing: ci/chart_tools puts it into out/tools")
    done = subprocess.run([program, script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout


def test_the_entry_point_waits_for_the_hosts_of_the_file_that_ddlrun_reads() -> None:
    script = (FILES / "files/usr/local/bin/bascule-host").read_text()
    (sources,) = re.findall(r"^ +file=(.*)$", script, re.MULTILINE)
    assert re.findall(r"\w{2,}|/[a-z/]+", sources) == [*hosts.HOSTFILE_VARIABLES, str(hosts.OPERATOR_HOSTFILE)]


def test_the_compose_file_makes_two_hosts_with_one_key_and_no_privileges() -> None:
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((FILES / "compose.yaml").read_text())["services"]
    assert {name: one["hostname"] for name, one in services.items()} == {"host1": "host1", "host2": "host2"}
    for one in services.values():
        # Not where programs may write.
        assert "${BASCULE_KEYS:-${HOME}/.config/bascule/keys}:/etc/bascule/ssh:ro" in one["volumes"]
        assert one["tmpfs"] == ["/run/bascule"]  # the key's copies stay in memory
        assert one["cap_drop"] == ["ALL"]
        assert one["security_opt"] == ["no-new-privileges:true"]


def test_no_key_lies_among_the_files() -> None:
    for path in FILES.rglob("*"):
        if path.is_file():
            assert not re.search(r"PRIVATE KEY|ssh-ed25519 A", path.read_text()), path


def test_every_option_is_one_of_makes_and_in_the_manual_and_the_other_way_round() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "images", "--help"],
        env={"PYTHONPATH": f"{ROOT}/ci:{ROOT}/recipes/bascule-tools/src", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    options = set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", done.stdout, re.MULTILINE)) - {"--help"}
    makefile, manual = (ROOT / "Makefile").read_text(), (ROOT / "docs/images.md").read_text()
    (given,) = re.findall(r"^IMAGE_OPTIONS = (.*)$", makefile, re.MULTILINE)
    by_variable = dict(re.findall(r"\$\(if \$\((\w+)\),(--[a-z-]+) ", given))
    by_itself = set(re.findall(r"\| `ARGS=\"?(--[a-z-]+)", manual))  # ARGS goes on as it is
    (context,) = re.findall(r"^\t\$\(IMAGES\) .*\) (--[a-z-]+) \$\(IMAGE_OPTIONS\)$", makefile, re.MULTILINE)
    assert options == {*by_variable.values(), *by_itself, context}
    assert set(re.findall(r"\| `([A-Z_]+)=[A-Za-z]+` \|", manual)) == set(by_variable)
    assert "`make context`" in manual or "make channel context" in manual
