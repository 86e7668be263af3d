"""docker or podman: whichever is there builds the image."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bundle.errors import BundleError

DOCKER, PODMAN = "docker", "podman"
TIMESTAMP = 315532800  # podman dates every file in a layer, and the image: the first day that zip can say
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le"}
_PATIENCE = 20  # seconds that an engine gets to say that it works
_SYS_RESOURCE = 24  # the number of the capability by which root may raise limits
# What the Containerfile says where it refuses. docker's BuildKit puts the step and the seconds before it, and docker's
# builder before that paints it red.
_OWN_WORDS = re.compile(r"^(?:\x1b\[\d+m)?(?:#\d+ )?(?:\d+\.\d+ )?bascule: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Engine:
    """What builds images; `reason` says why it is the one."""

    name: str
    reason: str = ""

    def run(self, *arguments: str | Path) -> str:
        """Run it with `arguments`; what it printed. Raises BundleError with its own last words."""
        command = [self.name, *map(str, arguments)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise BundleError(_failure(command, done.returncode, done.stderr))
        return done.stdout

    def told(self, image: str, what: str) -> str | None:
        """A part of what the engine knows of a local image, as {{.Id}}; None if there is none of this name."""
        try:
            return self.run("image", "inspect", "--format", what, image).strip().removeprefix("sha256:")
        except BundleError:
            return None

    def pull(self, image: str) -> None:
        """Fetch an image from its registry, unless it is here. Raises BundleError."""
        if self.told(image, "{{.Id}}") is None:
            status, said = _watched([self.name, "pull", image])
            if status:
                raise BundleError(_failure([self.name, "pull"], status, said))

    def build(
        self, file: Path, context: Path, image: str, arguments: Mapping[str, str], *options: str, network: bool = True
    ) -> str:
        """Build an image; its id. Without `network` the build proves that it needs none.

        Raises BundleError: with the Containerfile's own words if it refuses, else with the engine's last ones.
        """
        words = [self.name, "build", "--file", str(file), "--tag", image, *options, *self.limits()]
        words += [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
        if self.name == PODMAN:  # the format is docker's, which alone has the health check
            words += ["--format", "docker", "--timestamp", str(TIMESTAMP), "--layers"]
        status, said = _watched([*words, *(() if network else ("--network", "none")), str(context)])
        made = self.told(image, "{{.Id}}")
        if status:
            own = _OWN_WORDS.search(said)
            raise BundleError(f"{image}: {own[1]}" if own else _failure(words, status, said))
        if made is None:
            raise BundleError(
                f"{self.name} built {image} and does not find it; if its builder keeps images to itself "
                "(docker buildx ls): docker buildx use default"
            )
        return made

    def output(self, image: str, program: str, *words: str) -> str:
        """What a command prints in a new container of an image, without a network. Raises BundleError."""
        return self.run("run", "--rm", "--network", "none", *self.limits(), "--entrypoint", program, image, *words)

    def limits(self) -> tuple[str, ...]:
        """Options without which podman asks for more than root may have, as in some machines."""
        if self.name == DOCKER or os.geteuid() != 0 or _may_raise_limits():
            return ()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        return ("--ulimit", f"nofile={files}:{files}", "--ulimit", "nproc=4096:4096")

    def check_architecture(self, image: str) -> None:
        """Raises BundleError if a local base image is for another processor than this machine's."""
        wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
        if (found := self.told(image, "{{.Architecture}}")) != wanted:
            raise BundleError(
                f"BASE_IMAGE {image} is for {found}, and the environment for this machine's {wanted}: choose another"
            )


def choose(asked: str | None) -> Engine:
    """The engine that is `asked` for, or the first that works. Raises BundleError that says what each lacks."""
    if asked not in (None, DOCKER, PODMAN):
        raise BundleError(f"engine {asked!r}: expected docker or podman")
    lacking: list[str] = []
    for name in (asked,) if asked else (DOCKER, PODMAN):
        if why := _obstacle(name):
            lacking.append(f"{name}: {why}")
        else:
            return Engine(name, "asked for" if asked else "; ".join([*lacking, "this one works"]))
    raise BundleError(f"nothing here can build an image ({'; '.join(lacking)}): install podman or docker")


def _obstacle(name: str) -> str | None:
    """Why it cannot be used on this machine; None if it can."""
    if shutil.which(name) is None:
        return "not installed"
    if name == DOCKER and "podman" in subprocess.run([name, "--version"], capture_output=True, text=True).stdout:
        return "it is podman under docker's name: ENGINE=podman"
    command = [name, "version", "--format", "{{.Server.Version}}"] if name == DOCKER else [name, "info"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return f"it does not answer within {_PATIENCE} s"
    return f"it does not work here ({_last_words(done.stderr, 1)})" if done.returncode else None


def _watched(command: Sequence[str]) -> tuple[int, str]:
    """Run a build, which takes minutes: who sits at a terminal sees what it says. Its status, and what it said."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as file,
        subprocess.Popen(
            # Together: what a step says on stderr comes from docker's older builder on stdout.
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace",
        ) as job,
    ):  # fmt: skip
        for line in job.stdout or ():
            file.write(line)
            if sys.stderr.isatty():
                sys.stderr.write(line)
        file.seek(0)
        return job.wait(), file.read()


def _failure(command: Sequence[str], status: int, said: str) -> str:
    return f"{' '.join(command[:2])} failed with status {status}:\n{_last_words(said, 15)}"


def _may_raise_limits() -> bool:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> _SYS_RESOURCE & 1)


def _last_words(text: str, count: int) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-count:]) or "it said nothing"
