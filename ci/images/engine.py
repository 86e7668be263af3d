"""docker, podman or buildah: whichever is there builds the image."""

from __future__ import annotations

import json
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

from images import canonical
from images.errors import ImageError

NAMES = ("docker", "podman", "buildah")
# Every file in a layer, and the image itself, get this date (the first that zip can say), so that the same content has
# the same id whenever it is built.
TIMESTAMP = 315532800
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le"}
_SYS_RESOURCE = 24  # the number of the capability by which root may raise limits
# What the Containerfile says where it refuses. docker's BuildKit puts the step and the seconds before it, and docker's
# builder before that paints it red.
_OWN_WORDS = re.compile(r"^(?:\x1b\[\d+m)?(?:#\d+ )?(?:\d+\.\d+ )?bascule: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Build:
    """What is built: the image `name`, from a Containerfile with its `arguments` and a folder.

    Without `network` the build proves that it needs none (buildah's, by chroot, has the machine's all the same);
    without `cache` every layer is made anew.
    """

    containerfile: Path
    context: Path
    name: str
    arguments: Mapping[str, str]
    network: bool
    cache: bool = True


@dataclass(frozen=True)
class Engine:
    """One of them; `reason` says why it is the one."""

    name: str
    reason: str

    def run(self, *arguments: str | Path) -> str:
        """Run it with `arguments`; what it printed. Raises ImageError with its own last words."""
        command = [self.name, *map(str, arguments)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise ImageError(_failure(command, done.returncode, done.stderr))
        return done.stdout

    def image_id(self, name: str) -> str | None:
        """The id of a local image; None where there is none of this name."""
        kind = ("inspect", "--type", "image") if self.name == "buildah" else ("image", "inspect")
        key = "{{.FromImageID}}" if self.name == "buildah" else "{{.Id}}"
        try:
            return self.run(*kind, "--format", key, name).strip().removeprefix("sha256:")
        except ImageError:
            return None

    def architecture(self, name: str) -> str:
        """The processor that a local image is for, as containers call it: amd64, arm64."""
        if self.name == "buildah":
            return self.run("inspect", "--type", "image", "--format", "{{.OCIv1.Architecture}}", name).strip()
        return self.run("image", "inspect", "--format", "{{.Architecture}}", name).strip()

    def size(self, name: str) -> int | None:
        """What a local image takes in bytes, its base included; None where the engine does not say (buildah)."""
        if self.name == "buildah":
            return None
        return int(self.run("image", "inspect", "--format", "{{.Size}}", name))

    def pull(self, name: str) -> None:
        """Fetch an image from its registry, unless it is here. Raises ImageError."""
        if self.image_id(name) is None:
            self.run("pull", name)

    def build(self, build: Build, *, layers: bool = True) -> str:
        """Build an image; its id. Without `layers` all steps make one, of which nothing is kept for another build.

        Raises ImageError: with the Containerfile's own words where it refuses, else with the engine's last ones.
        """
        kept = () if self.name == "docker" else (f"--layers={str(layers).lower()}",)
        self._build(build, "--tag", build.name, *kept)
        if self.name != "docker":
            self._canonical(build.name)
        made = self.image_id(build.name)
        if made is None:
            kept_to_itself = "; if its builder keeps images to itself (docker buildx ls): docker buildx use default"
            remedy = kept_to_itself if self.name == "docker" else ""
            raise ImageError(f"{self.name} built {build.name} and does not find it{remedy}")
        return made

    def build_stage(self, target: str, build: Build) -> str:
        """Build the stage `target` of what is to become an image; its id. Raises ImageError."""
        with tempfile.TemporaryDirectory(prefix="bascule-image.") as folder:
            made = Path(folder, "id")
            self._build(build, "--target", target, "--iidfile", made, "--layers=true")
            return made.read_text().strip().removeprefix("sha256:")

    def _build(self, build: Build, *options: str | Path) -> None:
        words: list[str | Path] = [self.name, "build", "--file", build.containerfile, *options]
        if not build.cache:
            words.append("--no-cache")
        for key, value in build.arguments.items():
            words += ["--build-arg", f"{key}={value}"]
        if self.name != "docker":  # which keeps the health check anyway, and sets its own dates
            words += ["--format", "docker", "--timestamp", str(TIMESTAMP)]
        if self.name == "buildah":
            words += ["--isolation", "chroot"]
        elif not build.network:
            words += ["--network", "none"]
        command = [*map(str, words), *self.limits(), str(build.context)]
        status, said = _watched(command)
        if status:
            own = _OWN_WORDS.search(said)
            raise ImageError(f"{build.name}: {own[1]}" if own else _failure(command, status, said))

    def _canonical(self, name: str) -> None:
        """Put in the image's place the same one with an id that follows from its content alone."""
        if self.name == "buildah":
            files = canonical.of_buildah(json.loads(self.run("inspect", "--type", "image", name)))
        else:
            files = canonical.of_podman(json.loads(self.run("image", "inspect", name))[0])
        with tempfile.TemporaryDirectory(prefix="bascule-image.") as folder:
            for file, content in files.items():
                Path(folder, file).write_bytes(content)
            made = self.run("pull", "--quiet", f"dir:{folder}").strip()
        self.run("tag", made, name)

    def import_root(self, archive: Path, name: str) -> None:
        """Make an image of a root file system in a tar. Raises ImageError."""
        if self.name == "docker":
            self.run("import", archive, name)
            return
        # `podman import` would write the hour into the image.
        containerfile = archive.with_name("Containerfile")
        containerfile.write_text(f"FROM scratch\nADD {archive.name} /\n")
        self.build(Build(containerfile, archive.parent, name, {}, network=False, cache=False))

    def output(self, name: str, *command: str) -> str:
        """What a command prints in a new container of an image. Raises ImageError.

        Without a network, but for buildah's, which by chroot has the machine's.
        """
        if self.name != "buildah":
            return self.run(
                *("run", "--rm", "--network", "none", *self.limits(), "--entrypoint", command[0]), name, *command[1:]
            )
        container = self.run("from", "--pull-never", name).strip()
        try:
            return self.run("run", "--isolation", "chroot", container, "--", *command)
        finally:
            self.run("rm", container)

    def limits(self) -> tuple[str, ...]:
        """Options without which podman fails where root may not raise limits, as in some virtual machines."""
        if self.name != "podman" or os.geteuid() != 0 or _may_raise_limits():
            return ()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        return ("--ulimit", f"nofile={files}:{files}", "--ulimit", "nproc=4096:4096")


def choose(asked: str | None) -> Engine:
    """The engine that is `asked` for, or the first that works. Raises ImageError that says what each lacks."""
    if asked is not None and asked not in NAMES:
        raise ImageError(f"engine {asked!r}: expected {', '.join(NAMES)}")
    lacking = []
    for name in (asked,) if asked else NAMES:
        if why := _obstacle(name):
            lacking.append(f"{name}: {why}")
        else:
            return Engine(name, "asked for" if asked else "; ".join([*lacking, "this one works"]))
    raise ImageError(f"nothing here can build an image ({'; '.join(lacking)}): install podman, buildah or docker")


def _obstacle(name: str) -> str | None:
    if shutil.which(name) is None:
        return "not installed"
    if name != "docker":
        done = subprocess.run([name, "info"], capture_output=True, text=True)
        return f"it does not work here ({_last_words(done.stderr, 1)})" if done.returncode else None
    if "podman" in subprocess.run([name, "--version"], capture_output=True, text=True).stdout:
        return "it is podman under docker's name: ENGINE=podman"
    done = subprocess.run([name, "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True)
    return f"its daemon does not answer ({_last_words(done.stderr, 1)})" if done.returncode else None


def check_architecture(engine: Engine, base: str) -> None:
    """Raises ImageError where a local base image is for another processor than this machine's."""
    machine = platform.machine()
    wanted = _ARCHITECTURES.get(machine, machine)
    if (found := engine.architecture(base)) != wanted:
        raise ImageError(
            f"BASE_IMAGE {base} is for {found}, and the environment for this machine's {wanted}: choose another"
        )


def _watched(command: Sequence[str]) -> tuple[int, str]:
    """Run a build, which takes minutes: who sits at a terminal sees what it says. Its status, and what it said."""
    watched = sys.stderr.isatty()
    said = []
    with subprocess.Popen(
        # Together: what a step says on stderr comes from docker's older builder on stdout.
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as job:  # fmt: skip
        assert job.stdout is not None
        for line in job.stdout:
            said.append(line)
            if watched:
                sys.stderr.write(line)
    return job.returncode, "".join(said)


def _failure(command: Sequence[str], status: int, said: str) -> str:
    return f"{' '.join(command[:2])} failed with status {status}:\n{_last_words(said)}"


def _may_raise_limits() -> bool:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> _SYS_RESOURCE & 1)


def _last_words(text: str, count: int = 15) -> str:
    lines: Sequence[str] = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-count:]) or "it said nothing"
