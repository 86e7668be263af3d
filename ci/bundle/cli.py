"""The command line `python -m bundle`, with ci/ on PYTHONPATH: what `make channel`, `env` and `mirror` call."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rattler import RepoDataRecord, Subdir

from bascule import inventory
from bundle import base, build, environment_file, install, materials, mirror, process, smoke, stand_in
from bundle.environment_file import Environment
from bundle.errors import BundleError
from bundle.folders import Folders, write
from bundle.process import say

_TREE = Path(__file__).parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 0, 1 for an error, 2 for a wrong command line, 130 for an interrupt."""
    args = _parser().parse_args(arguments)
    where = Folders(_TREE, args.out.resolve())
    # Packages are unpacked once for all runs, and below the tree's own folder: nothing else is touched.
    os.environ.setdefault("RATTLER_CACHE_DIR", str(where.work / "cache"))
    try:
        with process.locked(where.out):
            args.run(args, where)
    except (BundleError, OSError) as error:  # a full disk, a folder that may not be written
        print(f"bundle: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bundle: interrupted; run this again to go on", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bundle",
        description="From Bascule's conda recipes to a tested channel, environments and a mirror, without conda.",
        epilog="docs/conda.md tells the whole story. What is made lies in out/: channel/ is the channel, bundle/ holds "
        "logs and what is kept between runs, stand-in/ the channel in place of conda-forge.",
    )
    parser.add_argument("--out", type=Path, default=_TREE / "out", metavar="DIR", help="where all goes (default: out)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    channel = commands.add_parser("channel", help="build and test what has changed, and index the channel")
    channel.add_argument(
        "--base", metavar="CHANNEL",
        help="what is not ours comes from: an address, a folder, or stand-in (default: conda-forge)",
    )  # fmt: skip
    channel.add_argument(
        "--frameworks", nargs="+", default=["pytorch"], choices=["none", *stand_in.FRAMEWORKS],
        help="those that packages are tested with, and that the stand-in holds (default: pytorch); what runs with "
        "another is built and not tested, what is compiled for another is not built",
    )  # fmt: skip
    channel.set_defaults(run=_channel)

    env = commands.add_parser("env", help="install one of envs/ into a folder and try it")
    env.add_argument("name", help="of the file in envs/, without .yaml; or the path of another")
    env.add_argument("--prefix", type=Path, metavar="DIR", help="where to (default: out/envs/NAME)")
    env.add_argument("--pip", action="store_true", help="do the file's pip step too, whose licences you then accept")
    env.add_argument("--no-smoke", action="store_true", help="do not try what was installed")
    env.set_defaults(run=_env)

    mirror_ = commands.add_parser("mirror", help="copy the channel with all that environments need, for no network")
    mirror_.add_argument("names", nargs="+", metavar="ENV", help="files of envs/, without .yaml")
    mirror_.set_defaults(run=_mirror)
    for one in (env, mirror_):
        one.add_argument("--base", metavar="CHANNEL", help="in place of what the channel was built against")
    return parser


def _channel(args: argparse.Namespace, where: Folders) -> None:
    below = base.choose(args.base, where, [one for one in args.frameworks if one != "none"])
    done = build.build(where, below, str(Subdir.current()))
    tests = sum(step.tests for step in done)
    say(f"{where.channel} is up to date: {len(done) - tests} packages were built, {tests} tested")


def _env(args: argparse.Namespace, where: Folders) -> None:
    asked = environment_file.read(where.environment(args.name))
    below = base.remembered(where, args.base)
    folder, name = where.out / "envs", asked.path.stem
    prefix = (args.prefix or folder / name).absolute()
    records = environment_file.solve(asked, asked.of_conda(with_pip=args.pip), where, below)
    install.install(records, prefix)
    _lock_file(asked, where, below, records)
    if asked.pip and args.pip:
        install.pip(prefix, "install", *asked.pip)
    elif asked.pip:
        step = f"{prefix / 'bin/python'} -m pip install {' '.join(asked.pip)}"
        say(f"left to you, with its licence: {step}   (or --pip)")
    materials.write(asked.name, inventory.read(prefix), folder / f"{name}.cdx.json", asked.pip)
    if not args.no_smoke:
        smoke.run(prefix, [record.name.normalized for record in records])
    say(f"{asked.name} is in {prefix}; use it: PATH={prefix / 'bin'}:$PATH")


def _lock_file(asked: Environment, where: Folders, below: base.Base, records: Sequence[RepoDataRecord]) -> None:
    """Beside the environments, if it is worth something: the stand-in's packages are on this machine alone."""
    path = where.out / "envs" / f"{asked.path.stem}-{Subdir.current()}.lock.txt"
    path.unlink(missing_ok=True)  # one of another channel is not of this environment
    if not below.is_stand_in:
        write(path, materials.explicit(asked.name, str(Subdir.current()), records))
        say(f"{path} names every package by its address and checksum, ours as files of {where.channel}")


def _mirror(args: argparse.Namespace, where: Folders) -> None:
    made = mirror.make(where, base.remembered(where, args.base), args.names)
    say(f"{made} and {made.name}.tar hold {', '.join(args.names)}; check it: {made / 'verify_mirror'}")
