"""Containers for the tests beside: podman as root, without a network unless one is named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from small_channel import SHARED

from bundle import interpreter
from images.cli import MADE
from images.engine import PODMAN, Engine

Done = subprocess.CompletedProcess[str]

ROOT = Path(__file__).parents[3]
OUT = SHARED.out  # the channel without frameworks, and what is built from it
OUT_ALL = ROOT / "out/test-images-all"  # the one with all frameworks
# What is needed, with the Debian package that it is in.
PROGRAMS = {
    **{name: name for name in ("podman", "runc", "mmdebstrap", "iptables")},
    "ssh-keygen": "openssh-client",
    "/usr/lib/podman/netavark": "netavark",
    "/usr/lib/podman/aardvark-dns": "aardvark-dns",
}
LIMITS = Engine(PODMAN).limits
PRIVATE = ("--cap-drop", "all", "--security-opt", "no-new-privileges")

NAMED = ("pod", "network")  # what has a name of its own besides containers

# One allreduce over all ranks: each says where it runs and the sum.
ALLREDUCE = (
    "import ddl, numpy, socket; ddl.init(); a = numpy.ones(100000, dtype='f4'); ddl.allreduce(a); "
    "assert (a == ddl.size()).all(); print(socket.gethostname(), ddl.rank(), ddl.size())"
)


@dataclass(frozen=True)
class Built:
    """An image: its name with its tag, its short id, and where its bill of materials lies."""

    reference: str
    id: str
    bill: Path


def obstacle() -> str | None:
    """Why no container can be run here; None where they can."""
    if os.geteuid() != 0:
        return "containers: this needs root"
    if missing := [package for program, package in PROGRAMS.items() if not shutil.which(program)]:
        return f"{', '.join(missing)} missing: ci/install_tools {' '.join(missing)} installs it"
    return interpreter.obstacle()


def podman(*arguments: str | Path, stdin: str = "", timeout: float = 110) -> Done:
    """Run podman; its messages about systemd, which is not there for health checks in CI, are left out."""
    command = ["podman", *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout)
    done.stderr = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("time="))
    return done


def run(image: str, *command: str, options: tuple[str, ...] = (), stdin: str = "", timeout: float = 110) -> Done:
    """`podman run` of a command, in a new container without a network or capabilities."""
    fixed = ("--rm", "--no-healthcheck", "--network", "none", *PRIVATE, *LIMITS())
    return podman("run", *fixed, *options, image, *command, stdin=stdin, timeout=timeout)


@contextmanager
def container(image: str, *options: str, command: tuple[str, ...] = ()) -> Generator[str]:
    """A container that runs in the background while the block does; its id."""
    started = podman("run", "--detach", "--no-healthcheck", *PRIVATE, *LIMITS(), *options, image, *command)
    assert started.returncode == 0, started.stderr
    name = started.stdout.strip()
    try:
        yield name
    finally:
        podman("rm", "--force", "--time", "0", name)


def present(*names: str) -> list[str]:
    """Which of these are names of containers, pods or networks that are there now, run or not."""
    asked = (("ps", "--all", "--format", "{{.Names}}"), *((kind, "ls", "--format", "{{.Name}}") for kind in NAMED))
    found = {name for words in asked for name in podman(*words).stdout.split()}
    return [name for name in names if name in found]


def logs(name: str) -> str:
    """What a container has said."""
    done = podman("logs", name)
    return done.stdout + done.stderr


def heard(name: str, words: str) -> str:
    """What a container has said by the time that a line of it has `words`; all of it where it ends without."""
    with subprocess.Popen(
        ["podman", "logs", "--follow", name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        assert job.stdout is not None
        said = ""
        for line in job.stdout:
            said += line
            if words in line:
                job.kill()
                break
    return said


def new_key(folder: Path, passphrase: str = "") -> Path:
    """`folder`, made with a key in it that UID 1000 owns."""
    folder.mkdir()
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "", "-f", str(folder / "id_ed25519")]
    subprocess.run(command, check=True, timeout=30)
    for path in (folder, *folder.iterdir()):
        shutil.chown(path, 1000, 1000)
    return folder


@contextmanager
def odd_base(folder: Path, containerfile: str, *options: str) -> Generator[str]:
    """A base image as `containerfile` makes it, in a folder that holds nothing else; its name."""
    (folder / "Containerfile").write_text(containerfile)
    name = f"localhost/bascule-test-base:{os.getpid()}"
    made = podman("build", "--network", "none", *LIMITS(), *options, "--tag", name, folder)
    assert made.returncode == 0, made.stderr
    try:
        yield name
    finally:
        podman("rmi", "--force", name)


@contextmanager
def network() -> Generator[str]:
    """A network that leads nowhere but to its containers, by their names; its name."""
    name = f"bascule-test-{os.getpid()}"
    made = podman("network", "create", "--internal", name)
    assert made.returncode == 0, made.stderr
    try:
        yield name
    finally:
        podman("network", "rm", "--force", name)


def build(
    *words: str, out: Path, base_image: str = "mmdebstrap", engine: str = "podman", timeout: float = 1800
) -> Done:
    """`make image` in all but make's own checks, from the channel in `out`; `words` are names and options."""
    options = ("--out", out, "--engine", engine, "--base-image", base_image)
    return _in_ci(("images", *words, *options), timeout)


def channel(*frameworks: str, out: Path, timeout: float = 1800) -> None:
    """`make channel` in a folder of its own, so that a developer's is left alone."""
    words = ("channel", "--base", "stand-in", "--frameworks", *(frameworks or ("none",)))
    done = _in_ci(("bundle", "--out", out, *words), timeout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def another_place(folder: Path) -> Path:
    """A folder with a channel and nothing that was made of it."""
    (folder / "bundle").mkdir(parents=True)
    shutil.copytree(OUT / "channel", folder / "channel")
    shutil.copy(OUT / "bundle/base.json", folder / "bundle")
    return folder


def made(done: Done) -> Iterator[tuple[str, str, Path]]:
    """Reference, id and bill of materials of each image that a build made."""
    for reference, short, materials in MADE.findall(done.stderr):
        yield reference, short, Path(materials)


def _in_ci(words: tuple[str | Path, ...], timeout: float) -> Done:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/ci:{ROOT}/recipes/bascule-tools/src"}
    command = [sys.executable, "-m", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
