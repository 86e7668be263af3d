"""The command line `python -m images`, with ci/ on PYTHONPATH: what `make image` and `make images` call."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import bundle.cli
from bundle import base, environment_file, process
from bundle.errors import BundleError
from bundle.folders import Folders, write
from images import bill, containerfile, engine, environment, names, root
from images.engine import Engine
from images.environment import Environment

_TREE = Path(__file__).parents[2]
CONTAINERFILE = _TREE / "envs/images/Containerfile"
MADE_HERE = "mmdebstrap"  # in the place of a base image
_ARGUMENTS = ("ENV_ARCH", "PACKAGES")  # of the Containerfile's first stage, besides the base image
# What is said of an image that was built: its reference, its id, and where its bill of materials lies.
MADE = re.compile(r"^images: (\S+) is ([0-9a-f]+).*; what is in it: (.*)$", re.MULTILINE)


def main(words: Sequence[str] | None = None) -> int:
    """Build images; the exit status: 0, 1 for an error, 2 for a wrong command line, 130 for an interrupt."""
    args = _parser().parse_args(words)
    where = Folders(_TREE, Path(os.path.abspath(args.out)))  # by the name that the user gave, be it a link
    os.environ.setdefault("RATTLER_CACHE_DIR", str(where.work / "cache"))
    os.umask(0o022)  # what is laid out is in the image with its rights, which are to be the same for all who build
    try:
        chosen = None if args.context_only else engine.choose(args.engine)
        if chosen:
            say(f"{chosen.name} builds ({chosen.reason})")
        if not where.channel.is_dir() and (status := _channel(args, where)):
            return status
        with process.locked(where.out):
            for name in args.names:
                _image(solve(name, args, where), where, args, chosen)
    except (BundleError, OSError) as error:
        print(f"images: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("images: interrupted; run this again to go on", file=sys.stderr)
        return 130
    return 0


def say(words: str) -> None:
    """Tell the user."""
    print(f"images: {words}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="images",
        description="Make container images of environments in envs/, from the channel in out/, which is made if there "
        "is none; `make channel` brings it up to date.",
        epilog="docs/images.md tells the whole story. Contexts, ids and bills of materials lie in out/images.",
    )
    (default,) = re.findall(r"^ARG BASE_IMAGE=(.*)$", CONTAINERFILE.read_text(), re.MULTILINE)
    parser.add_argument("names", nargs="+", metavar="ENV", help="the name of a file in envs/, without .yaml")
    parser.add_argument(
        "--base-image", default=default, metavar="IMAGE",
        help="the operating system: a Debian or Ubuntu, CUDA's images among them; or mmdebstrap, which makes "
        f"a Debian on the spot (default: {default})",
    )  # fmt: skip
    parser.add_argument("--engine", metavar="PROGRAM", help="docker or podman (default: the first that works)")
    parser.add_argument(
        "--context-only", action="store_true", help="lay out what goes into an image, and leave its build to you"
    )
    parser.add_argument("--no-cache", action="store_true", help="make every layer anew, with Debian's newest packages")
    parser.add_argument("--base", metavar="CHANNEL", help="what is not ours comes from, as for `make channel`")
    parser.add_argument("--out", type=Path, default=_TREE / "out", metavar="DIR", help="where all goes (default: out)")
    return parser


def _channel(args: argparse.Namespace, where: Folders) -> int:
    """`make channel`, with the frameworks that the environments need; its exit status."""
    asked = [environment_file.read(where.environment(name)) for name in args.names]
    frameworks = sorted({one for environment in asked for one in environment.frameworks()}) or ["none"]
    words = ["--out", str(where.out), "channel", *(["--base", args.base] if args.base else [])]
    return bundle.cli.main([*words, "--frameworks", *frameworks])


def solve(name: str, args: argparse.Namespace, where: Folders) -> Environment:
    """The environment of envs/NAME.yaml from our channel and the one below it. Raises BundleError."""
    asked = environment_file.read(where.environment(name))
    below = base.remembered(where, args.base)
    records = environment_file.solve(asked, asked.of_conda(with_pip=True), where, below)
    own = where.channel.as_uri()
    ours = frozenset(one.name.normalized for one in records if str(one.channel or "").rstrip("/") == own)
    if not ours:
        raise BundleError(f"envs/{name}.yaml names no package of {where.channel}: an image would hold nothing of ours")
    return Environment(name, tuple(records), ours, asked.pip, root.STAND_IN if below.is_stand_in else ())


def _image(solved: Environment, where: Folders, args: argparse.Namespace, chosen: Engine | None) -> None:
    """Lay out the context and, with an engine, build the image and write its bill of materials."""
    begin, folder = time.monotonic(), where.out / "images" / solved.name
    packages = [names.Package(one.name.normalized, str(one.version), str(one.build)) for one in solved.records]
    described = names.describe(solved.name, packages, solved.pip)
    if solved.pip:
        say(f"{solved.name}: {', '.join(solved.pip)} is not to be passed on, and the image neither: see its licence")
    context = environment.lay_out(solved, folder, Path(os.environ["RATTLER_CACHE_DIR"]))
    say(f"{solved.name} is laid out in {context} ({time.monotonic() - begin:.1f} s)")
    given = arguments(described, solved, args.base_image)
    if chosen is None:
        complete(described, context, given)
        return
    if made_here := args.base_image == MADE_HERE:
        given["BASE_IMAGE"] = root.make(chosen, cache=not args.no_cache)
    else:
        try:
            chosen.pull(args.base_image)
        except BundleError as error:
            raise BundleError(
                f"BASE_IMAGE {args.base_image} is not here and could not be fetched; BASE_IMAGE={MADE_HERE} makes a "
                f"Debian on the spot. {error}"
            ) from None
    chosen.check_architecture(given["BASE_IMAGE"])
    materials = folder / f"{described.title}-{described.tag}.cdx.json"
    materials.unlink(missing_ok=True)  # a build that fails between the two leaves none, rather than another image's
    options = ("--no-cache",) if args.no_cache else ()
    image = build(chosen, context, described.reference, given, *options, network=not made_here)
    write(materials, json.dumps(bill.make(chosen, described.reference, described.title), indent=1) + "\n")
    megabytes = int(chosen.told(image, "{{.Size}}") or 0) / 1e6
    say(
        f"{described.reference} is {image[:12]}, {megabytes:.0f} MB with its operating system; "
        f"built in {time.monotonic() - begin:.1f} s; what is in it: {materials}"
    )


def build(chosen: Engine, context: Path, image: str, given: Mapping[str, str], *options: str, network: bool) -> str:
    """Build an image; its id. Raises BundleError.

    docker finds the framework's layer by itself; podman would read gigabytes to compare them, so that stage is kept as
    an image of its own.
    """
    text = CONTAINERFILE.read_text()
    if chosen.name == engine.DOCKER:
        return chosen.build(CONTAINERFILE, context, image, given, *options, network=network)
    first, second = containerfile.halves(text)
    below = str(chosen.told(given["BASE_IMAGE"], "{{.Id}}"))
    parts = (first, (context / "framework.lock").read_text(), below, *(given[name] for name in _ARGUMENTS))
    kept = f"localhost/bascule-framework:{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"
    if options or chosen.told(kept, "{{.Id}}") is None:
        chosen.build(CONTAINERFILE, context, kept, given, "--target", containerfile.STAGE, *options, network=network)
    file = context.parent / "Containerfile"
    file.write_text(f"FROM {kept}\n{second}")
    return chosen.build(file, context, image, given, *options, network=network)


def complete(described: names.Description, context: Path, given: Mapping[str, str]) -> None:
    """Put a Containerfile with its arguments into the context, which then is all that an engine elsewhere needs."""
    if given["BASE_IMAGE"] == MADE_HERE:
        raise BundleError(f"BASE_IMAGE={MADE_HERE}: whoever builds from a context fetches its base; name an image")
    file = context / "Containerfile"
    file.write_text(containerfile.filled(CONTAINERFILE.read_text(), given))
    say(f"build it: podman build --format docker --tag {described.reference} {os.path.relpath(context)}")
    say(f"      or: docker build --file {os.path.relpath(file)} --tag {described.reference} {os.path.relpath(context)}")


def arguments(described: names.Description, solved: Environment, base_image: str) -> dict[str, str]:
    """The Containerfile's arguments."""
    return {
        "BASE_IMAGE": base_image,
        "ENV_ARCH": os.uname().machine,
        "PACKAGES": " ".join((*root.HOST, *solved.system)),
        "ENV_NAME": described.environment,
        "ENV_TITLE": described.title,
        "VERSION": described.tag,
        "REDISTRIBUTION": described.redistribution,
        "REVISION": _revision(),
    }


def _revision() -> str:
    """The commit that is built, with a mark if files differ from it; "unknown" outside a repository."""
    # In a container git takes a repository of another owner for a trap, and this one is what we run already.
    command = ["git", "-c", "safe.directory=*", "-C", str(_TREE), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True)
    except FileNotFoundError:  # a tree that was copied to where no git is
        return "unknown"
    return done.stdout.strip() or "unknown"
