"""The command line of the testbed: `sudo .venv/bin/python tests/testbed --help`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from checks import check
from processes import guards
from testbed import AGENT, Testbed, find, start
from topology import Decoy, TestbedError, Topology, cluster

_ABOUT = """\
A virtual cluster on this machine, for trying out and testing distributed programs: hosts that are network namespaces,
racks, links of chosen rates, and faults to order. It needs root. Nothing of this machine's own network is touched.
"""

_EXAMPLES = """\
a session:
  sudo .venv/bin/python tests/testbed up --hosts 2+2 --link 200mbit --uplink 100mbit
  sudo .venv/bin/python tests/testbed check              # does each link carry what it should?
  sudo .venv/bin/python tests/testbed run h0 -- ip address
  sudo .venv/bin/python tests/testbed cut rack1          # nothing goes over its uplink any more
  sudo .venv/bin/python tests/testbed mend rack1
  sudo .venv/bin/python tests/testbed kill h3            # power off
  sudo .venv/bin/python tests/testbed show
  sudo .venv/bin/python tests/testbed down

Every host sees this machine's files, with /etc/hosts, /run, /dev/shm and a name of its own. docs/testbed.md tells more.
"""

_SHAPE = """\
  --hosts 4         four hosts in one rack
  --hosts 2+3       a rack of two and a rack of three, under one spine
Rates are bits a second on the wire, the same both ways: 200mbit, 1.5gbit. Of 1 Gbit/s programs get 956 Mbit/s.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 when something could not be done or a check failed, 2 for wrong arguments."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        return int(args.action(args))
    except ValueError as error:  # a topology that cannot be
        parser.error(str(error))
    except (TestbedError, OSError) as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 1


def _up(args: argparse.Namespace) -> int:
    made = start(_topology(args), name=args.name, detached=True)
    print(made.picture())
    print(f"\ntestbed {made.name!r} is up until: tests/testbed down")
    print(f"launch agent, in place of ssh: {AGENT}")
    return 0


def _run(args: argparse.Namespace) -> int:
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    command = find(args.name).command(args.host, words or [os.environ.get("SHELL", "/bin/sh")])
    os.execv(command[0], command)  # what runs there gets the terminal, and its exit status is ours


def _show(args: argparse.Namespace) -> int:
    beds = [find(args.name)] if args.name else [Testbed(guard) for guard in guards()]
    for bed in beds:
        print(f"testbed {bed.name!r}\n{bed.picture()}")
        for host in bed.hosts:
            for process in bed.processes(host):
                print(f"  {host}: {process.pid} {process.command}")
    if not beds:
        print("no testbed is running" if os.geteuid() == 0 else "no testbed can be seen: only root sees them")
    return 0


def _kill(args: argparse.Namespace) -> int:
    return _change(args, lambda bed: bed.kill(args.what))


def _cut(args: argparse.Namespace) -> int:
    return _change(args, lambda bed: bed.cut(args.what))


def _mend(args: argparse.Namespace) -> int:
    return _change(args, lambda bed: bed.mend(args.what))


def _check(args: argparse.Namespace) -> int:
    passed = True
    for one in check(find(args.name), args.seconds):
        print(one, flush=True)
        passed &= one.passed
    return 0 if passed else 1


def _down(args: argparse.Namespace) -> int:
    if args.name is None and not guards():
        print("no testbed is running")
        return 0
    for bed in [Testbed(guard) for guard in guards()] if args.all else [find(args.name)]:
        bed.close()
        print(f"testbed {bed.name!r} is down")
    return 0


def _change(args: argparse.Namespace, action: Callable[[Testbed], None]) -> int:
    bed = find(args.name)
    action(bed)
    print(bed.picture())
    return 0


def _topology(args: argparse.Namespace) -> Topology:
    return cluster(args.hosts, link=args.link, uplink=args.uplink, decoys=args.decoy, shuffle=args.shuffle)


def _counts(text: str) -> list[int]:
    if not all(word.isdigit() for word in text.split("+")):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of hosts, rack by rack, such as 4 or 2+3")
    return [int(word) for word in text.split("+")]


def _decoy(text: str) -> Decoy:
    name, _, network = text.partition("=")
    network, _, own = network.partition(",")
    if own not in ("", "own"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME, NAME=NETWORK or NAME=NETWORK,own")
    try:
        return Decoy(name, network, same=not own) if network else Decoy(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 60:
        raise argparse.ArgumentTypeError(f"{text}: expected 0.1 to 60 seconds")
    return seconds


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tests/testbed", description=_ABOUT, epilog=_EXAMPLES, formatter_class=raw)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, action: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        epilog = _SHAPE if name == "up" else None
        added = commands.add_parser(name, help=about, description=about, epilog=epilog, formatter_class=raw)
        added.set_defaults(action=action)
        added.add_argument("--name", help="which testbed (default: the only one that runs)")
        return added

    up = command("up", _up, "make a testbed, which lasts until `down`")
    up.set_defaults(name="testbed")
    up.add_argument("--hosts", type=_counts, default=[4], metavar="N[+N...]", help="hosts in each rack (default: 4)")
    up.add_argument("--link", metavar="RATE", help="of each host's link (default: not shaped)")
    up.add_argument("--uplink", metavar="RATE", help="of each rack's uplink (default: not shaped)")
    up.add_argument(
        "--decoy",
        type=_decoy,
        action="append",
        default=[],
        metavar="NAME[=NETWORK[,own]]",
        help="an interface on each host that leads nowhere, such as docker0; own: with an address of its own on each",
    )
    up.add_argument("--shuffle", type=int, metavar="SEED", help="deal the names, so that they tell no racks")

    run = command("run", _run, "run a command on a host (default: a shell)")
    run.add_argument("host")
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND")

    command("show", _show, "draw what runs, with what is cut and killed, and the hosts' processes")
    kill = command("kill", _kill, "a host loses its power: all its processes end and its link is gone")
    kill.add_argument("what", metavar="HOST")
    for name, action, about in (
        ("cut", _cut, "pull the cable of a host, or of a rack's uplink"),
        ("mend", _mend, "put a cable back"),
    ):
        command(name, action, about).add_argument("what", metavar="HOST|RACK")
    checked = command("check", _check, "measure links and uplinks, and try the decoys")
    checked.add_argument("--seconds", type=_seconds, default=1.0, help="how long to measure (default: 1)")
    down = command("down", _down, "take a testbed down; nothing of it stays")
    down.add_argument("--all", action="store_true", help="every testbed on this machine")
    return parser


if __name__ == "__main__":
    sys.exit(main())
