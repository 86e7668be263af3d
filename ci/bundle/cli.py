"""The command line `python -m bundle`, with ci/ on PYTHONPATH: what `make channel`, `env` and `mirror` call."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import yaml
from rattler import RepoDataRecord, Subdir

from bascule import inventory
from bundle import (
    base,
    bench,
    build,
    environment_file,
    explicit,
    install,
    lock,
    materials,
    mirror,
    rendering,
    smoke,
    solving,
    variants,
)
from bundle.environment_file import Environment
from bundle.errors import BundleError, ToolError, words
from bundle.folders import Folders
from bundle.progress import say

_TREE = Path(__file__).parents[2]
_BASES = "auto (conda-forge where it answers, else the stand-in), conda-forge, stand-in, or an address or folder"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 0, 1 for an error, 2 for a wrong command line, 130 for an interrupt."""
    args = _parser().parse_args(arguments)
    # Packages are unpacked once for all runs, and below the tree's own folder: nothing else is touched.
    os.environ.setdefault("RATTLER_CACHE_DIR", str(args.out.resolve() / "bundle" / "cache"))
    try:
        args.run(args, Folders(_TREE, args.out.resolve()))
    except BundleError as error:
        print(f"bundle: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a full disk, a folder that may not be written
        print(f"bundle: error: {words(error)}; mend that and run this again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bundle: interrupted; run this again to go on", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bundle",
        description="From Bascule's conda recipes to a tested channel, environments and a mirror, also where there is "
        "no conda and no conda channel is reached.",
        epilog="docs/conda.md tells the whole story. What is made lies in out/: channel/ is the channel, bundle/ holds "
        "logs and what is kept between runs, stand-in/ the channel in place of conda-forge.",
    )
    parser.add_argument("--out", type=Path, default=_TREE / "out", metavar="DIR", help="where all goes (default: out)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    channel = commands.add_parser("channel", help="build and test what has changed, and index the channel")
    _add_frameworks(channel)
    channel.add_argument(
        "--mpi", metavar="MPI",
        help="for this one of conda_build_config.yaml only, which a mirror cannot be made of",
    )  # fmt: skip
    channel.set_defaults(run=_channel)

    env = commands.add_parser("env", help="install one of envs/ into a folder and try it")
    env.add_argument("name", help="of the file in envs/, without .yaml; or the path of another")
    env.add_argument("--prefix", type=Path, metavar="DIR", help="where to (default: out/envs/NAME)")
    env.add_argument("--pip", action="store_true", help="do the file's pip step too, whose licences you then accept")
    env.add_argument("--no-smoke", action="store_true", help="do not try what was installed")
    _add_base(env)
    env.set_defaults(run=_env)

    mirror_ = commands.add_parser("mirror", help="copy the channel with all that environments need, for no network")
    mirror_.add_argument("names", nargs="+", metavar="ENV", help="files of envs/, without .yaml")
    mirror_.add_argument("--target", type=Path, metavar="DIR", help="where to (default: out/mirror)")
    mirror_.add_argument("--no-tar", action="store_true", help="the folder only")
    _add_base(mirror_)
    mirror_.set_defaults(run=_mirror)

    bench_ = commands.add_parser("bench", help="time all of it from nothing, in an --out of its own, which is emptied")
    _add_frameworks(bench_)
    bench_.set_defaults(run=_bench)

    render = commands.add_parser("render", help="print a recipe as rattler-build reads it")
    render.add_argument("recipe", type=Path, help="a meta.yaml")
    render.set_defaults(run=_render)
    return parser


def _add_base(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base", metavar="CHANNEL",
        help="what is not ours comes from: an address or a folder (default: what the channel was built against)",
    )  # fmt: skip


def _add_frameworks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", default=base.AUTO, metavar="CHANNEL", help=f"what is not ours comes from: {_BASES}")
    parser.add_argument(
        "--frameworks", nargs="+", default=["pytorch"], choices=["none", "pytorch", "tensorflow"],
        help="those that packages are tested with, and that the stand-in holds (default: pytorch); what runs with "
        "another is built and not tested, what is compiled for another is not built",
    )  # fmt: skip


def _channel(args: argparse.Namespace, where: Folders) -> None:
    where = replace(where, mpi=args.mpi)
    with lock.held(where.work):
        frameworks = [one for one in args.frameworks if one != "none"]
        below = base.choose(args.base, where, frameworks, variants.read(where.variants))
        done = build.build(where, below, str(Subdir.current()))
    left = sum(bool(step.builds and step.unbuilt) for step in done)
    built = sum(step.builds is not None for step in done) - left
    tested = sum(step.tests is not None for step in done)
    did = f"{built or 'none'} had to be built, {tested or 'none'} to be tested"
    say(f"{where.channel} has {len(done) - left} packages; {did}")


def _env(args: argparse.Namespace, where: Folders) -> None:
    path = Path(args.name)
    if path.suffix != ".yaml":
        path = where.tree / "envs" / f"{args.name}.yaml"
    asked = environment_file.read(path)
    with lock.held(where.out / "envs"), _read(where):
        _install(args, where, asked, base.remembered(where, args.base))


@contextmanager
def _read(where: Folders) -> Generator[None]:
    """Neither the channel nor the stand-in that it may have been built against changes meanwhile.

    Whoever writes one of them holds no lock of the other: nobody waits in a circle.
    """
    with lock.held(where.channel, shared=True), lock.held(where.stand_in, shared=True):
        yield


def _install(args: argparse.Namespace, where: Folders, asked: Environment, below: base.Base) -> None:
    folder, name = where.out / "envs", asked.path.stem
    prefix = (args.prefix or folder / name).absolute()
    records = solving.solve(asked, asked.of_conda(with_pip=args.pip), where, below)
    with install.claimed(prefix):
        install.put(records, prefix)
        _lock_file(asked, where, below, records)
        if asked.pip and not args.pip:
            step = f"{prefix / 'bin/python'} -m pip install {' '.join(asked.pip)}"
            say(f"left to you, with its licence: {step}   (or --pip)")
        elif asked.pip:
            install.pip(prefix, asked.pip)
        # With what pip has installed; what its step would bring stands there as optional.
        materials.write(asked.name, inventory.read(prefix), folder / f"{name}.cdx.json", materials.of_pip(asked.pip))
        if not args.no_smoke:
            smoke.run(prefix, [record.name.normalized for record in records])
    say(f"{asked.name} is in {prefix}; use it: PATH={prefix / 'bin'}:$PATH")


def _lock_file(asked: Environment, where: Folders, below: base.Base, records: Sequence[RepoDataRecord]) -> None:
    """Beside the environments, where it is worth something. Without it nothing is wrong with the environment."""
    path = where.out / "envs" / f"{asked.path.stem}-{Subdir.current()}.lock.txt"
    path.unlink(missing_ok=True)  # one of another channel is not of this environment
    if below.is_stand_in:
        return
    try:
        explicit.write(asked.name, str(Subdir.current()), records, path)
        say(f"{path} names every package by its address and checksum, ours as files of {where.channel}")
    except ToolError as error:
        say(f"no lock file was made: {error}")


def _mirror(args: argparse.Namespace, where: Folders) -> None:
    target = (args.target or where.out / "mirror").absolute()
    with _read(where):
        below = base.remembered(where, args.base)
        mirror.claim(target, where, tar=not args.no_tar)
        with lock.held(target):
            made = mirror.make(where, below, args.names, target, tar=not args.no_tar)
    say(f"{made} holds {', '.join(args.names)}; check it: {target / 'verify_mirror'}")


def _bench(args: argparse.Namespace, where: Folders) -> None:
    made = bench.run(where, ["--base", args.base, "--frameworks", *args.frameworks])
    say(f"all figures, with the machine: {made}")


def _render(args: argparse.Namespace, where: Folders) -> None:
    document = rendering.render(args.recipe, variants.read(where.variants))
    print(yaml.safe_dump(document, sort_keys=False, width=120), end="")
