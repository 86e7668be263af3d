"""The command line `python -m images`, with ci/ on PYTHONPATH: what `make image` and `make images` call."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bundle import base, environment_file, install, lock, mirror
from bundle.errors import BundleError
from bundle.folders import Folders
from images import bill, engine, environment, names, root
from images.environment import Environment
from images.errors import ImageError

_TREE = Path(__file__).parents[2]
CONTAINERFILE = _TREE / "envs/images/Containerfile"
MADE_HERE = "mmdebstrap"  # in the place of a base image
DEFAULT_BASE = "debian:bookworm-slim"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build images; the exit status: 0, 1 for an error, 2 for a wrong command line, 130 for an interrupt."""
    args = _parser().parse_args(arguments)
    where = Folders(_TREE, args.out.resolve())
    os.environ.setdefault("RATTLER_CACHE_DIR", str(where.work / "cache"))
    try:
        chosen = engine.choose(args.engine)
        say(f"{chosen.name} builds ({chosen.reason})")
        with lock.held(where.out / "images"):
            for name in args.names:
                _image(name, args, where, chosen)
    except (BundleError, ImageError) as error:
        print(f"images: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"images: error: {error.strerror}: {error.filename}; mend that and run this again", file=sys.stderr)
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
    parser.add_argument("--base", metavar="CHANNEL", help="in the place of what the channel was built against")
    parser.add_argument("--out", type=Path, default=_TREE / "out", metavar="DIR", help="where all goes (default: out)")
    return parser


def _image(name: str, args: argparse.Namespace, where: Folders, chosen: engine.Engine) -> None:
    begin = time.monotonic()
    solved = solve(name, args, where)
    packages = [names.Package(one.name.normalized, str(one.version), str(one.build)) for one in solved.records]
    described = names.describe(name, packages, solved.pip)
    if solved.pip:
        say(f"{name}: {', '.join(solved.pip)} goes in by your own pip step; its licence forbids passing the image on")
    folder = where.out / "images" / name
    context = environment.lay_out(solved, folder, Path(os.environ["RATTLER_CACHE_DIR"]))
    laid_out = time.monotonic()
    made_here = args.base_image == MADE_HERE
    base_image = root.make(chosen) if made_here else args.base_image
    if not made_here:
        try:
            chosen.pull(base_image)
        except ImageError as error:
            raise ImageError(
                f"BASE_IMAGE {base_image} is not here and could not be fetched; BASE_IMAGE={MADE_HERE} makes a Debian "
                f"on the spot. {error}"
            ) from None
    engine.check_architecture(chosen, base_image)
    image = chosen.build(
        CONTAINERFILE, context, described.reference, arguments(described, base_image), network=not made_here
    )
    materials = folder / f"bascule-{name}-{described.tag}.cdx.json"
    materials.write_text(json.dumps(bill.make(chosen, described.reference, described.title), indent=1) + "\n")
    size = chosen.size(described.reference)
    megabytes = f", {size / 1e6:.0f} MB with its operating system" if size else ""
    say(
        f"{described.reference} is {image[:12]}{megabytes}; laid out in {laid_out - begin:.1f} s, built in "
        f"{time.monotonic() - laid_out:.1f} s; what is in it: {materials}"
    )


def solve(name: str, args: argparse.Namespace, where: Folders) -> Environment:
    """The environment of envs/NAME.yaml from our channel and the one below it. Raises BundleError."""
    asked = environment_file.read(where.tree / "envs" / f"{name}.yaml")
    own = where.channel.as_uri()
    channels = mirror.channels_of(asked, where, base.remembered(where, args.base))
    records = install.solve(asked.specs, channels)
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
    """The commit that is built, with a mark where files differ from it; empty outside a repository."""
    command = ["git", "-C", str(_TREE), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
