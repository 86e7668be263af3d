"""How long the bundle takes, from nothing: `python -m bundle.bench FOLDER`, which writes FOLDER/bundle.json.

A figure is the wall time of a command, from its start to its end, once, with the processor's time of all that it
started. "Nothing" is an empty folder in place of out/: what pip keeps of earlier downloads in the user's cache is
there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from bundle.folders import is_ours

_MARK = ".bench"  # in a folder that a bench may empty


def main() -> int:
    """Measure; the exit status: 0, 1 if a command fails."""
    parser = argparse.ArgumentParser(prog="bundle.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="it is emptied")
    parser.add_argument(
        "--base", default="stand-in", metavar="CHANNEL", help="as for `make channel` (default: stand-in)"
    )
    parser.add_argument("--image", metavar="ENV", help="build an image too, on a Debian that is made here (needs root)")
    args = parser.parse_args()
    out = args.folder.absolute()
    if not is_ours(out, _MARK):
        parser.error(f"{out} would be emptied, and holds what no bench made: name an empty or a new folder")
    load = os.getloadavg()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / _MARK).touch()
    bundle = [sys.executable, "-m", "bundle", "--out", str(out)]
    channel, env = [*bundle, "channel", "--base", args.base], [*bundle, "env", "pytorch", "--no-smoke", "--prefix"]
    commands = {
        "channel, from nothing": channel,
        "channel, nothing changed": channel,
        "bascule-pytorch, the first time": [*env, str(out / "envs/first")],
        "bascule-pytorch into another prefix": [*env, str(out / "envs/second")],
        "mirror of pytorch": [*bundle, "mirror", "pytorch"],
        "verify_mirror": [str(out / "mirror/verify_mirror")],
    }
    if args.image:
        image = [sys.executable, "-m", "images", args.image, "--out", str(out), "--base-image", "mmdebstrap"]
        commands |= {f"image {args.image}": image, f"image {args.image}, nothing changed": image}
    figures = []
    for name, command in commands.items():
        seconds, processor_seconds, status = _timed(command, out / "log.txt")
        print(f"bench: {name}: {seconds:.1f} s, {processor_seconds:.1f} s of processors", file=sys.stderr, flush=True)
        if status:
            print(f"bench: error: it fails:\n{(out / 'log.txt').read_text()[-3000:]}", file=sys.stderr)
            return 1
        figures.append({"name": name, "seconds": seconds, "processor_seconds": processor_seconds})
    folders = ("channel", "stand-in/channel", "envs/first", "mirror")
    sizes = {name: sum(one.stat().st_size for one in (out / name).rglob("*") if one.is_file()) for name in folders}
    document = {
        "machine": {"cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}", "cpu": processor()},
        "versions": {name: metadata.version(name) for name in ("py-rattler", "py-rattler-build")},
        "python": platform.python_version(),
        "load_before": load,
        "figures": figures,
        "bytes": sizes,
    }
    (out / "bundle.json").write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _timed(command: Sequence[str], log: Path) -> tuple[float, float, int]:
    """Wall and processor seconds of a command, and its status; what it says goes to `log`."""
    begun, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with log.open("w") as said:
        status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said).returncode
    seconds, now = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime, status


def processor() -> str:
    """Its name, as far as the system tells."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
