"""The command line `python -m images`, with ci/ on PYTHONPATH: what `make image` and `make images` call."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bundle import base, environment_file, install, lock, mirror
from bundle.errors import BundleError, SolveError
from bundle.folders import Folders
from images import bill, containerfile, engine, environment, names, root
from images.environment import Environment
from images.errors import ImageError

_TREE = Path(__file__).parents[2]
CONTAINERFILE = _TREE / "envs/images/Containerfile"
STAGE = "framework"  # of the Containerfile: what is the same from commit to commit
MADE_HERE = "mmdebstrap"  # in the place of a base image
DEFAULT_BASE = "debian:bookworm-slim"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build images; the exit status: 0, 1 for an error, 2 for a wrong command line, 130 for an interrupt."""
    args = _parser().parse_args(arguments)
    where = Folders(_TREE, Path(os.path.abspath(args.out)))  # by the name that the user gave, be it a link
    os.environ.setdefault("RATTLER_CACHE_DIR", str(where.work / "cache"))
    try:
        chosen = None if args.context_only else engine.choose(args.engine)
        if chosen:
            say(f"{chosen.name} builds ({chosen.reason})")
        with lock.held(where.out / "images"), lock.held(where.channel, shared=True):
            for name in args.names:
                described, context = _lay_out(name, args, where)
                if chosen:
                    _image(described, context, args, chosen)
                else:
                    _tell_how(described, context, args.base_image)
    except (BundleError, ImageError) as error:
        print(f"images: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"images: error: {error}; mend that and run this again", file=sys.stderr)
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
        description="Make container images of environments in envs/, from the channel that `make channel` made.",
        epilog="docs/images.md tells the whole story. Contexts, ids and bills of materials lie in out/images.",
    )
    parser.add_argument("names", nargs="+", metavar="ENV", help="the name of a file in envs/, without .yaml")
    parser.add_argument(
        "--base-image", default=DEFAULT_BASE, metavar="IMAGE",
        help="the operating system: a Debian or Ubuntu, CUDA's images among them; or mmdebstrap, which makes "
        f"a Debian on the spot (default: {DEFAULT_BASE})",
    )  # fmt: skip
    parser.add_argument("--engine", metavar="PROGRAM", help="docker, podman or buildah (default: the first that works)")
    parser.add_argument(
        "--context-only", action="store_true", help="lay out what goes into an image, and leave its build to you"
    )
    parser.add_argument("--no-cache", action="store_true", help="make every layer anew, with Debian's newest packages")
    parser.add_argument("--base", metavar="CHANNEL", help="in the place of what the channel was built against")
    parser.add_argument("--out", type=Path, default=_TREE / "out", metavar="DIR", help="where all goes (default: out)")
    return parser


def _lay_out(name: str, args: argparse.Namespace, where: Folders) -> tuple[names.Description, Path]:
    begin = time.monotonic()
    solved = solve(name, args, where)
    packages = [names.Package(one.name.normalized, str(one.version), str(one.build)) for one in solved.records]
    described = names.describe(name, packages, solved.pip)
    if solved.pip:
        say(f"{name}: {', '.join(solved.pip)} goes in by your own pip step; its licence forbids passing the image on")
    context = environment.lay_out(solved, where.out / "images" / name, Path(os.environ["RATTLER_CACHE_DIR"]))
    say(f"{name} is laid out in {context} ({time.monotonic() - begin:.1f} s)")
    return described, context


def _tell_how(described: names.Description, context: Path, base_image: str) -> None:
    """Complete the context, so that an engine elsewhere builds the image from it alone."""
    if base_image == MADE_HERE:
        raise ImageError(f"BASE_IMAGE={MADE_HERE}: whoever builds from a context fetches its base; name an image")
    file = context / "Containerfile"
    file.write_text(containerfile.filled(CONTAINERFILE.read_text(), arguments(described, base_image)))
    say(f"build it: podman build --format docker --tag {described.reference} {os.path.relpath(context)}")
    say(f"      or: docker build --file {os.path.relpath(file)} --tag {described.reference} {os.path.relpath(context)}")


def _image(described: names.Description, context: Path, args: argparse.Namespace, chosen: engine.Engine) -> None:
    begin = time.monotonic()
    made_here = args.base_image == MADE_HERE
    base_image = root.make(chosen, cache=not args.no_cache) if made_here else args.base_image
    if not made_here:
        try:
            chosen.pull(base_image)
        except ImageError as error:
            raise ImageError(
                f"BASE_IMAGE {base_image} is not here and could not be fetched; BASE_IMAGE={MADE_HERE} makes a Debian "
                f"on the spot. {error}"
            ) from None
    engine.check_architecture(chosen, base_image)
    image = _build(described, context, base_image, chosen, network=not made_here, cache=not args.no_cache)
    materials = context.parent / f"{described.title}-{described.tag}.cdx.json"
    materials.write_text(json.dumps(bill.make(chosen, described.reference, described.title), indent=1) + "\n")
    size = chosen.size(described.reference)
    megabytes = f", {size / 1e6:.0f} MB with its operating system" if size else ""
    say(
        f"{described.reference} is {image[:12]}{megabytes}; built in {time.monotonic() - begin:.1f} s; "
        f"what is in it: {materials}"
    )


def _build(
    described: names.Description, context: Path, base_image: str, chosen: engine.Engine, *, network: bool, cache: bool
) -> str:
    """Build the image, from its framework where that is there from an earlier build; its id."""
    given = arguments(described, base_image)
    whole = engine.Build(CONTAINERFILE, context, described.reference, given, network=network, cache=cache)
    if chosen.name == "docker":  # it notices by itself, and fast, that a gigabyte is the same
        return chosen.build(whole)
    first, second = containerfile.halves(CONTAINERFILE.read_text(), STAGE)
    parts = (first, (context / "framework.lock").read_text(), str(chosen.image_id(base_image)), given["ENV_ARCH"])
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    kept = context.parent / "framework.image"
    found = kept.read_text().split() if kept.is_file() else []
    if not (cache and found[:1] == [key] and chosen.image_id(found[1])):
        found = [key, chosen.build_stage(STAGE, whole)]
        kept.write_text(" ".join(found))
    file = context.parent / "Containerfile"
    file.write_text(f"FROM {found[1]}\n{second}")
    return chosen.build(replace(whole, containerfile=file, cache=False), layers=False)


def solve(name: str, args: argparse.Namespace, where: Folders) -> Environment:
    """The environment of envs/NAME.yaml from our channel and the one below it. Raises BundleError."""
    asked = environment_file.read(where.tree / "envs" / f"{name}.yaml")
    own = where.channel.as_uri()
    below = base.remembered(where, args.base)
    channels = mirror.channels_of(asked, where, below)
    try:
        records = install.solve(asked.specs, channels)
    except SolveError as error:
        if below.name != base.STAND_IN:
            raise
        raise SolveError(
            f"{error}\nThe stand-in for conda-forge has only the frameworks that it was made with: make channel "
            'FRAMEWORKS="pytorch tensorflow" makes one with both'
        ) from None
    ours = frozenset(one.name.normalized for one in records if str(one.channel or "").rstrip("/") == own)
    if not ours:
        raise ImageError(f"envs/{name}.yaml names no package of {where.channel}: an image would hold nothing of ours")
    return Environment(name, tuple(records), ours, asked.pip)


def arguments(described: names.Description, base_image: str) -> dict[str, str]:
    """The Containerfile's arguments."""
    return {
        "BASE_IMAGE": base_image,
        "ENV_ARCH": os.uname().machine,
        "ENV_NAME": described.environment,
        "ENV_TITLE": described.title,
        "VERSION": described.tag,
        "REDISTRIBUTION": described.redistribution,
        "REVISION": _revision(),
    }


def _revision() -> str:
    """The commit that is built, with a mark where files differ from it; "unknown" outside a repository."""
    # In a container git takes a repository of another owner for a trap, and this one is what we run already.
    command = ["git", "-c", "safe.directory=*", "-C", str(_TREE), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True)
    except FileNotFoundError:  # a tree that was copied to where no git is
        return "unknown"
    return done.stdout.strip() or "unknown"
