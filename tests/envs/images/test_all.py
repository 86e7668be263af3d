"""Every image that `make image` knows, built and tried; with their frameworks that takes minutes."""

import json
import re
from pathlib import Path

import bill_schema
import pytest

import containers
from containers import podman, run
from manual import blocks, follow

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(3600)]

STEP = containers.ROOT / "recipes/bascule-lms/step.py"
IMPORTS = {
    "pytorch": "torch, ddl.torch, nilearn",
    "tensorflow": "tensorflow",
    "snapml": "snapml",
    "all": "torch, tensorflow, snapml",
}


@pytest.fixture(scope="module")
def channel(needs_podman: None) -> None:
    containers.channel("pytorch", "tensorflow", out=containers.OUT_ALL)


def built(name: str) -> containers.Built:
    done = containers.build(name, out=containers.OUT_ALL)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (found,) = containers.made(done)
    return containers.Built(*found)


@pytest.mark.parametrize("name", IMPORTS)
def test_the_image_has_what_its_name_says_and_says_whether_it_may_be_passed_on(channel: None, name: str) -> None:
    image = built(name)
    assert re.fullmatch(rf"localhost/bascule-{name}:[\d.]+-cpu-py311", image.reference)
    done = run(image.reference, "python", "-c", f"import lms, ddl, {IMPORTS[name]}", timeout=300)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(podman("image", "inspect", image.reference).stdout)
    says = found["Labels"]["bascule.redistribution"]
    assert says.startswith("forbidden: snapml") == (name in ("snapml", "all")), says
    assert bill_schema.fault(image.bill) is None
    bill = {one["name"] for one in json.loads(image.bill.read_text())["components"]}
    assert {"bascule-lms", "libc6"} <= bill
    assert ("snapml" in bill) == (name in ("snapml", "all"))


def test_run_it_as_the_manual_says(channel: None, place: Path) -> None:
    image = built("pytorch").reference
    (commands,) = blocks("Run it")
    assert commands.startswith(f"IMAGE={image}\n")  # what the manual calls it
    done = follow(commands, place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^step 5 ", done.stdout, re.MULTILINE), done.stdout


def test_a_step_under_lms_loses_nothing_and_ranks_reduce_without_a_network(channel: None) -> None:
    image = built("pytorch").reference
    mounted = ("--volume", f"{STEP}:/workspace/step.py:ro")
    plain = run(image, "python", "step.py", options=mounted)
    assert plain.returncode == 0, plain.stderr
    swapped = run(image, "lms", "run", "--budget", "2MB", "step.py", options=mounted)
    assert swapped.returncode == 0, swapped.stderr
    assert swapped.stdout == plain.stdout != ""
    ranks = run(image, "ddlrun", "-np", "2", "python", "-c", containers.ALLREDUCE)
    assert ranks.returncode == 0, ranks.stderr


def test_beside_the_environment_and_the_system_an_image_takes_little(channel: None) -> None:
    image = built("pytorch").reference
    layers = [layer["size"] for layer in json.loads(podman("history", "--format", "json", image).stdout)]
    environment = int(run(image, "du", "-sbx", "/opt/conda").stdout.split()[0])
    assert sum(layers[:-1]) - environment < 60e6, (layers, environment)
