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
from typing import ClassVar

from images import canonical
from images.errors import ImageError

# Every file in a layer, and the image itself, get this date (the first that zip can say), so that the same content has
# the same id whenever it is built.
TIMESTAMP = 315532800
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le"}
_PATIENCE = 20  # seconds that an engine gets to say that it works
_SYS_RESOURCE = 24  # the number of the capability by which root may raise limits
# What the Containerfile says where it refuses. docker's BuildKit puts the step and the seconds before it, and docker's
# builder before that paints it red.
_OWN_WORDS = re.compile(r"^(?:\x1b\[\d+m)?(?:#\d+ )?(?:\d+\.\d+ )?bascule: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Build:
    """What is built: the image `name`, from a Containerfile with its `arguments` and a folder.

    Without `network` the build proves that it needs none; without `cache` every layer is made anew.
    """

    containerfile: Path
    context: Path
    name: str
    arguments: Mapping[str, str]
    network: bool
    cache: bool = True


@dataclass(frozen=True)
class Engine:
    """What builds images; here is what several do alike. `reason` says why it is the one."""

    name: ClassVar[str]
    keeps_stages: ClassVar[bool] = False  # it finds a stage that it has built by itself, and fast, gigabytes and all
    id_key: ClassVar[str] = "{{.Id}}"  # of an image, in what the engine tells of it
    architecture_key: ClassVar[str] = "{{.Architecture}}"
    reason: str

    @classmethod
    def obstacle(cls) -> str | None:
        """Why it cannot be used on this machine; None where it can."""
        if shutil.which(cls.name) is None:
            return "not installed"
        trouble = _trouble([cls.name, "info"])
        return f"it does not work here ({trouble})" if trouble else None

    def run(self, *arguments: str | Path) -> str:
        """Run it with `arguments`; what it printed. Raises ImageError with its own last words."""
        command = [self.name, *map(str, arguments)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise ImageError(_failure(command, done.returncode, done.stderr))
        return done.stdout

    def image_id(self, name: str) -> str | None:
        """The id of a local image; None where there is none of this name."""
        try:
            return self._told(name, self.id_key).removeprefix("sha256:")
        except ImageError:
            return None

    def architecture(self, name: str) -> str:
        """The processor that a local image is for, as containers call it: amd64, arm64."""
        return self._told(name, self.architecture_key)

    def size(self, name: str) -> int | None:
        """What a local image takes in bytes, its base included; None where the engine does not say."""
        return int(self._told(name, "{{.Size}}"))

    def pull(self, name: str) -> None:
        """Fetch an image from its registry, unless it is here. Raises ImageError."""
        if self.image_id(name) is None:
            status, said = _watched([self.name, "pull", name])
            if status:
                raise ImageError(_failure([self.name, "pull"], status, said))

    def build(self, build: Build, *, layers: bool = True) -> str:
        """Build an image; its id. Without `layers` all steps may make one, of which nothing is kept for another build.

        Raises ImageError: with the Containerfile's own words where it refuses, else with the engine's last ones.
        """
        raise NotImplementedError

    def build_stage(self, target: str, build: Build) -> str:
        """Build the stage `target` of what is to become an image; its id. Raises ImageError."""
        return self._build(build, "--target", target, layers=True)

    def import_root(self, archive: Path, name: str) -> None:
        """Make an image of a root file system in a tar. Raises ImageError."""
        self.run("import", archive, name)

    def output(self, name: str, *command: str) -> str:
        """What a command prints in a new container of an image, without a network. Raises ImageError."""
        program, *words = command
        return self.run("run", "--rm", "--network", "none", *self.limits(), "--entrypoint", program, name, *words)

    def limits(self) -> tuple[str, ...]:
        """Options without which builds and containers fail where root may not raise limits, as in some machines."""
        return ()

    def _build(self, build: Build, *options: str, layers: bool) -> str:
        words = [self.name, "build", "--file", str(build.containerfile), *options]
        if not build.cache:
            words.append("--no-cache")
        for key, value in build.arguments.items():
            words += ["--build-arg", f"{key}={value}"]
        words += [*self._format(layers), *self._isolation(build), *self.limits()]
        with tempfile.TemporaryDirectory(prefix="bascule-image.") as folder:
            made = Path(folder, "id")
            status, said = _watched([*words, "--iidfile", str(made), str(build.context)])
            if status:
                own = _OWN_WORDS.search(said)
                raise ImageError(f"{build.name}: {own[1]}" if own else _failure(words, status, said))
            return made.read_text().strip().removeprefix("sha256:")

    def _format(self, layers: bool) -> tuple[str, ...]:
        """Options for what a build makes."""
        return ()

    def _isolation(self, build: Build) -> tuple[str, ...]:
        """Options for what a step of a build can reach."""
        return () if build.network else ("--network", "none")

    def _told(self, name: str, what: str) -> str:
        """A part of what the engine knows of an image."""
        return self.run("image", "inspect", "--format", what, name).strip()


class Docker(Engine):
    """docker, whose daemon builds: with its older builder or with BuildKit, which set dates of their own."""

    name = "docker"
    keeps_stages = True

    @classmethod
    def obstacle(cls) -> str | None:
        """Podman under its name, too, and a daemon that does not answer."""
        if shutil.which(cls.name) is None:
            return "not installed"
        if "podman" in subprocess.run([cls.name, "--version"], capture_output=True, text=True).stdout:
            return "it is podman under docker's name: ENGINE=podman"
        trouble = _trouble([cls.name, "version", "--format", "{{.Server.Version}}"])
        return f"its daemon does not answer ({trouble})" if trouble else None

    def build(self, build: Build, *, layers: bool = True) -> str:
        """As above; every step is a layer, and kept."""
        self._build(build, "--tag", build.name, layers=True)
        made = self.image_id(build.name)
        if made is None:
            raise ImageError(
                f"docker built {build.name} and does not find it; if its builder keeps images to itself "
                "(docker buildx ls): docker buildx use default"
            )
        return made


class Podman(Engine):
    """podman, which dates an image as it is told, so that it can be given an id that follows from its content."""

    name = "podman"

    def build(self, build: Build, *, layers: bool = True) -> str:
        """As above. The image has its name when it is finished, with an id that follows from its content alone."""
        first = self._build(build, layers=layers)
        try:
            made = self._canonical(first)
        except ImageError as error:
            words = str(error).partition("\n")[2] or str(error)
            print(f"images: {build.name} keeps the id of this one build: {words}", file=sys.stderr)
            made = first
        self.run("tag", made, build.name)
        if made != first:
            self._forget(first)
        return made

    def import_root(self, archive: Path, name: str) -> None:
        """By a build: `podman import` would write the hour into the image."""
        containerfile = archive.with_name("Containerfile")
        containerfile.write_text(f"FROM scratch\nADD {archive.name} /\n")
        self.build(Build(containerfile, archive.parent, name, {}, network=False, cache=False))

    def limits(self) -> tuple[str, ...]:
        """Those that this process has, for podman asks for more."""
        if os.geteuid() != 0 or _may_raise_limits():
            return ()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        return ("--ulimit", f"nofile={files}:{files}", "--ulimit", "nproc=4096:4096")

    def _format(self, layers: bool) -> tuple[str, ...]:
        """The format is docker's, which alone has the health check."""
        return ("--format", "docker", "--timestamp", str(TIMESTAMP), f"--layers={str(layers).lower()}")

    def _canonical(self, image: str) -> str:
        """Make the same image with an id that follows from its content; that id. Raises ImageError."""
        with tempfile.TemporaryDirectory(prefix="bascule-image.") as folder:
            for file, content in self._files(image).items():
                Path(folder, file).write_bytes(content)
            return self.run("pull", "--quiet", f"dir:{folder}").strip().removeprefix("sha256:")

    def _files(self, image: str) -> dict[str, bytes]:
        return canonical.of_podman(json.loads(self.run("image", "inspect", image))[0])

    def _forget(self, image: str) -> None:
        """Remove an image without a name, and none of those that it was built from."""
        self.run("rmi", "--no-prune", image)


class Buildah(Podman):
    """buildah, which is podman's builder, with other words for the rest.

    It isolates by chroot, which asks for no right; its steps and containers have the machine's network, asked or not.
    """

    name = "buildah"
    id_key = "{{.FromImageID}}"
    architecture_key = "{{.OCIv1.Architecture}}"

    def size(self, name: str) -> int | None:
        """It does not say."""
        return None

    def output(self, name: str, *command: str) -> str:
        """As podman's, but with the machine's network."""
        container = self.run("from", "--pull-never", name).strip()
        try:
            return self.run("run", "--isolation", "chroot", container, "--", *command)
        finally:
            self.run("rm", container)

    def limits(self) -> tuple[str, ...]:
        """None: by chroot, its processes have this one's."""
        return ()

    def _isolation(self, build: Build) -> tuple[str, ...]:
        return ("--isolation", "chroot")

    def _files(self, image: str) -> dict[str, bytes]:
        return canonical.of_buildah(json.loads(self.run("inspect", "--type", "image", image)))

    def _forget(self, image: str) -> None:
        """Leave it: with it, buildah would remove what it was built from."""

    def _told(self, name: str, what: str) -> str:
        return self.run("inspect", "--type", "image", "--format", what, name).strip()


ENGINES: Mapping[str, type[Engine]] = {one.name: one for one in (Docker, Podman, Buildah)}


def choose(asked: str | None) -> Engine:
    """The engine that is `asked` for, or the first that works. Raises ImageError that says what each lacks."""
    if asked is not None and asked not in ENGINES:
        raise ImageError(f"engine {asked!r}: expected {', '.join(ENGINES)}")
    lacking = []
    for kind in (ENGINES[asked],) if asked else ENGINES.values():
        if why := kind.obstacle():
            lacking.append(f"{kind.name}: {why}")
        else:
            return kind("asked for" if asked else "; ".join([*lacking, "this one works"]))
    raise ImageError(f"nothing here can build an image ({'; '.join(lacking)}): install podman, buildah or docker")


def check_architecture(engine: Engine, base: str) -> None:
    """Raises ImageError where a local base image is for another processor than this machine's."""
    machine = platform.machine()
    wanted = _ARCHITECTURES.get(machine, machine)
    if (found := engine.architecture(base)) != wanted:
        raise ImageError(
            f"BASE_IMAGE {base} is for {found}, and the environment for this machine's {wanted}: choose another"
        )


def _trouble(command: Sequence[str]) -> str | None:
    """The last line of what a command says that fails; None where it does not."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return f"nothing in {_PATIENCE} s"
    return _last_words(done.stderr, 1) if done.returncode else None


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
