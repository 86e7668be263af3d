"""docker: a daemon of the test's own builds the image, with its older builder and with BuildKit, and runs it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import containers
from containers import ALLREDUCE, new_key

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(1800)]

MIB = 1 << 20
CLIENT = "/usr/bin/docker"  # Debian's


BUILDERS = ("0", "1")  # of DOCKER_BUILDKIT: the older one, BuildKit


@dataclass(frozen=True)
class Docker:
    """The client of a daemon."""

    socket: Path

    def __call__(self, *words: str | Path, check: bool = True) -> str:
        """Run docker; what it printed, with its errors where failing is not one."""
        command = [CLIENT, "--host", f"unix://{self.socket}", *map(str, words)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout if check else done.stdout + done.stderr

    def build(self, builder: str, base_image: str, *options: str) -> containers.Done:
        """`make image ENV=base ENGINE=docker`."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DOCKER_HOST", f"unix://{self.socket}")
            patch.setenv("DOCKER_BUILDKIT", builder)
            # Debian's client has BuildKit's in it; another in front of it may want a plug-in for that.
            patch.setenv("PATH", f"{Path(CLIENT).parent}{os.pathsep}{os.environ['PATH']}")
            return containers.build("base", *options, out=containers.OUT, engine="docker", base_image=base_image)


@pytest.fixture(scope="module")
def docker(needs_podman: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    """A daemon beside the machine's own, with a bridge of its own that leads nowhere, and without rules of iptables."""
    if missing := [program for program in (CLIENT, "dockerd") if not shutil.which(program)]:
        pytest.skip(f"{', '.join(missing)} missing: ci/install_tools docker.io installs it")
    folder = tmp_path_factory.mktemp("docker")
    made = Docker(folder / "socket")
    places = ("--data-root", folder / "data", "--exec-root", folder / "exec", "--pidfile", folder / "pid")
    bridge = f"dkr{os.getpid()}"
    for words in (("link", "add", bridge, "type", "bridge"), ("address", "add", "172.30.99.1/24", "dev", bridge)):
        subprocess.run(["ip", *words], check=True, timeout=30)
    apart = ("--host", f"unix://{made.socket}", "--bridge", bridge, "--iptables=false")
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(["dockerd", *apart, *places], stdin=subprocess.DEVNULL, stdout=log, stderr=log) as daemon,
    ):
        try:
            deadline = time.monotonic() + 60
            while "Server" not in made("version", check=False):
                if daemon.poll() is not None or time.monotonic() > deadline:
                    pytest.skip(f"dockerd does not run here: {(folder / 'log').read_text().splitlines()[-1:]}")
                time.sleep(0.2)
            yield made
        finally:
            daemon.terminate()
            daemon.wait(60)
            subprocess.run(["ip", "link", "delete", bridge], check=True, timeout=30)


@pytest.fixture(scope="module")
def base_image(docker: Docker) -> str:
    """The Debian that is made here, as the first build has named it."""
    containers.channel(out=containers.OUT)
    done = docker.build("0", "mmdebstrap")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    ((reference, *_),) = containers.made(done)
    label = '{{index .Config.Labels "org.opencontainers.image.base.name"}}'
    return docker("image", "inspect", "--format", label, reference).strip()


@pytest.mark.parametrize("builder", BUILDERS)
def test_it_builds_the_image_and_runs_it(docker: Docker, base_image: str, builder: str) -> None:
    done = docker.build(builder, base_image, "--no-cache")
    assert done.returncode == 0, done.stderr
    ((reference, _, bill),) = containers.made(done)
    assert bill.is_file()
    says = docker("image", "inspect", "--format", "{{.Config.User}} {{.Config.Healthcheck.Test}} {{.Size}}", reference)
    user, *health, size = says.split()
    assert (user, " ".join(health)) == ("1000:1000", "[CMD lms --version]")
    assert 200 * MIB < int(size) < 500 * MIB
    run = ("run", "--rm", "--network", "none", "--cap-drop", "all", reference)
    assert docker(*run, "lms", "--version").startswith("lms ")
    assert docker(*run, "ddlrun", "-np", "2", "python", "-c", ALLREDUCE).count(" 2\n") == 2


@pytest.mark.parametrize("builder", BUILDERS)
def test_what_the_containerfile_says_of_a_base_image_is_the_error(
    docker: Docker, base_image: str, builder: str, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {base_image}\nRUN printf '#!/bin/sh\\nexit 1\\n' >/usr/bin/getconf\n")
    name = f"bascule-test-base:{os.getpid()}"
    docker("build", "--network", "none", "--tag", name, tmp_path)
    done = docker.build(builder, name)
    assert done.returncode == 1
    assert re.search(r"images: error: .*: the base image has no glibc.*choose a Debian or Ubuntu", done.stderr)


def test_two_containers_reduce_with_no_option_but_the_hosts(docker: Docker, base_image: str, tmp_path: Path) -> None:
    ((reference, *_),) = containers.made(docker.build("0", base_image))
    keys = new_key(tmp_path / "keys")
    docker("network", "create", "--internal", "job")
    try:
        for name in ("c1", "c2"):
            mounted = ("--volume", f"{keys}:/etc/bascule/ssh:ro", "--tmpfs", "/run/bascule")
            docker("run", "--detach", "--network", "job", "--name", name, "--hostname", name, *mounted, reference)
        said = docker("exec", "c1", "ddlrun", "-H", "c1,c2", "python", "-c", ALLREDUCE)
    finally:
        docker("rm", "--force", "c1", "c2", check=False)
        docker("network", "rm", "job", check=False)
    assert sorted(said.splitlines()[:2]) == ["c1 0 2", "c2 1 2"]
