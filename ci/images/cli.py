"""The command line `python -m images`, with ci/ on PYTHONPATH: what `make image` and `make images` call."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bundle import base, environment_file, lock, solving
from bundle.errors import BundleError
from bundle.folders import Folders, write
from images import bill, containerfile, engine, environment, framework, names, root, system
from images.environment import Environment
from images.errors import ImageError

_TREE = Path(__file__).parents[2]
CONTAINERFILE = _TREE / "envs/images/Containerfile"
MADE_HERE = "mmdebstrap"  # in the place of a base image
DEFAULT_BASE = "debian:bookworm-slim"
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
        with lock.held(where.out / "images"), lock.held(where.channel, shared=True):
            for name in args.names:
                solved = solve(name, args, where)
                described = describe(solved)
                context = _lay_out(solved, where)
                given = arguments(described, solved, args.base_image)
                if chosen:
                    _image(described, context, given, chosen, cache=not args.no_cache)
                else:
                    _complete(described, context, given)
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


def describe(solved: Environment) -> names.Description:
    """What the image of an environment is called. Raises ImageError."""
    packages = [names.Package(one.name.normalized, str(one.version), str(one.build)) for one in solved.records]
    return names.describe(solved.name, packages, solved.pip)


def _lay_out(solved: Environment, where: Folders) -> Path:
    """The context of the image's build."""
    begin, name = time.monotonic(), solved.name
    if solved.pip:
        say(f"{name}: {', '.join(solved.pip)} goes in by your own pip step; its licence forbids passing the image on")
    context = environment.lay_out(solved, where.out / "images" / name, Path(os.environ["RATTLER_CACHE_DIR"]))
    say(f"{name} is laid out in {context} ({time.monotonic() - begin:.1f} s)")
    return context


def _complete(described: names.Description, context: Path, arguments: Mapping[str, str]) -> None:
    """Put a Containerfile with its arguments into the context, which then is all that an engine elsewhere needs."""
    if arguments["BASE_IMAGE"] == MADE_HERE:
        raise ImageError(f"BASE_IMAGE={MADE_HERE}: whoever builds from a context fetches its base; name an image")
    file = context / "Containerfile"
    file.write_text(containerfile.filled(CONTAINERFILE.read_text(), arguments))
    say(f"build it: podman build --format docker --tag {described.reference} {os.path.relpath(context)}")
    say(f"      or: docker build --file {os.path.relpath(file)} --tag {described.reference} {os.path.relpath(context)}")


def _image(
    described: names.Description,
    context: Path,
    arguments: dict[str, str],
    chosen: engine.Engine,
    *,
    cache: bool,
) -> None:
    """Build the image and write its bill of materials; says what it is, as MADE reads it."""
    begin = time.monotonic()
    base_image = arguments["BASE_IMAGE"]
    made_here = base_image == MADE_HERE
    if made_here:
        base_image = root.make(chosen, cache=cache)
    else:
        try:
            chosen.pull(base_image)
        except ImageError as error:
            raise ImageError(
                f"BASE_IMAGE {base_image} is not here and could not be fetched; BASE_IMAGE={MADE_HERE} makes a Debian "
                f"on the spot. {error}"
            ) from None
    engine.check_architecture(chosen, base_image)
    materials = context.parent / f"{described.title}-{described.tag}.cdx.json"
    materials.unlink(missing_ok=True)  # a build that fails between the two leaves none, rather than another image's
    image = framework.build(
        engine.Build(
            CONTAINERFILE, context, described.reference, arguments | {"BASE_IMAGE": base_image},
            network=not made_here, cache=cache,
        ),
        chosen,
    )  # fmt: skip
    document = bill.make(chosen, described.reference, described.title)
    write(materials, json.dumps(document, indent=1) + "\n")
    size = chosen.size(described.reference)
    megabytes = f", {size / 1e6:.0f} MB with its operating system" if size else ""
    say(
        f"{described.reference} is {image[:12]}{megabytes}; built in {time.monotonic() - begin:.1f} s; "
        f"what is in it: {materials}"
    )


def solve(name: str, args: argparse.Namespace, where: Folders) -> Environment:
    """The environment of envs/NAME.yaml from our channel and the one below it. Raises BundleError."""
    asked = environment_file.read(where.tree / "envs" / f"{name}.yaml")
    below = base.remembered(where, args.base)
    records = solving.solve(asked, asked.of_conda(with_pip=True), where, below)
    own = where.channel.as_uri()
    ours = frozenset(one.name.normalized for one in records if str(one.channel or "").rstrip("/") == own)
    if not ours:
        raise ImageError(f"envs/{name}.yaml names no package of {where.channel}: an image would hold nothing of ours")
    return Environment(name, tuple(records), ours, asked.pip, system.STAND_IN if below.is_stand_in else ())


def arguments(described: names.Description, solved: Environment, base_image: str) -> dict[str, str]:
    """The Containerfile's arguments."""
    return {
        "BASE_IMAGE": base_image,
        "ENV_ARCH": os.uname().machine,
        "PACKAGES": " ".join((*system.HOST, *solved.system)),
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
