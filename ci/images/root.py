"""A Debian root file system of our own, for where no registry is reached: with what the Containerfile installs."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bundle.errors import BundleError
from images.engine import TIMESTAMP, Engine

SUITE = "bookworm"
# Debian's packages that an environment needs below it: for hosts of a job, and for the stand-in, which packs this
# machine's python and pip's wheels, which look for these in the system.
HOST = ("openssh-client", "openssh-server", "passwd", "tini")
STAND_IN = (
    *("libbz2-1.0", "libexpat1", "libffi8", "libgomp1", "liblzma5", "libncursesw6", "libnsl2", "libreadline8"),
    *("libsqlite3-0", "libssl3", "libstdc++6", "libuuid1", "zlib1g"),
)
# Nobody reads a manual in there; licences stay.
_LEFT_OUT = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/i18n/*", "/usr/share/info/*")
_KEPT = ("/usr/share/doc/*/copyright",)
_SETTINGS = ("Acquire::http", "Acquire::https", "Acquire::Retries", "Acquire::Check-Date", "Acquire::Check-Valid-Until")
# Debian's own marks of one installation, and what only apt reads.
_CLEAN = 'rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/* "$1"/var/log/* "$1"/etc/ssh/ssh_host_* "$1"/etc/machine-id'
# What an engine mounts over while it builds: this machine's own is not kept, and none is left where there was no file.
_MOUNTED_OVER = 'cd "$1"/etc && for file in hosts hostname resolv.conf; do rm -f $file && : >$file; done'


def make(engine: Engine, packages: Sequence[str] = (*HOST, *STAND_IN), *, cache: bool = True) -> str:
    """The name of the image, with `packages` and what they need over Debian's essential ones.

    It is made if it is not there yet or `cache` is false. Raises BundleError.
    """
    options = ["--variant=essential", *([f"--include={','.join(packages)}"] if packages else [])]
    options += [f"--dpkgopt=path-exclude={path}" for path in _LEFT_OUT]
    options += [f"--dpkgopt=path-include={path}" for path in _KEPT]
    options += [f"--customize-hook={hook}" for hook in (_CLEAN, _MOUNTED_OVER)]
    # Another list of packages makes another image, and the old one is not taken for it.
    of = " ".join([*options, str(TIMESTAMP)])
    name = f"localhost/bascule-os:{SUITE}-{hashlib.sha256(of.encode()).hexdigest()[:12]}"
    if cache and engine.told(name, "{{.Id}}"):
        return name
    if os.geteuid() != 0:
        raise BundleError(
            "BASE_IMAGE=mmdebstrap: only root can make a root file system; run as root, or name an image to fetch"
        )
    if shutil.which("mmdebstrap") is None:
        raise BundleError("BASE_IMAGE=mmdebstrap: mmdebstrap is missing; ci/install_tools mmdebstrap installs it")
    with tempfile.TemporaryDirectory(prefix="bascule-os.") as folder:
        archive = Path(folder, "root.tar")
        settings = [f"--aptopt={setting}" for setting in apt_settings()]
        command = ["mmdebstrap", "--quiet", *options, *settings, SUITE, str(archive), *sources()]
        dated = os.environ | {"SOURCE_DATE_EPOCH": str(TIMESTAMP)}  # so that the same packages make the same image
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=dated)
        if done.returncode:
            raise BundleError(f"{shlex.join(command[:3])} ... could not make Debian {SUITE}:\n{done.stderr[-2000:]}")
        engine.run("import", archive, name)
    return name


def apt_settings() -> Iterator[str]:
    """How apt gets to its mirror here: it holds there too."""
    for key in _SETTINGS:
        command = ["apt-config", "dump", "--no-empty", "--format", '%F "%v";%n', key]
        yield from subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


def sources() -> list[str]:
    """Where Debian's packages come from: this machine's mirror if it runs the same Debian, else mmdebstrap's own."""
    release = Path("/etc/os-release").read_text()
    if not (re.search(r"^ID=debian$", release, re.MULTILINE) and f"VERSION_CODENAME={SUITE}" in release):
        return []
    files = (Path("/etc/apt/sources.list"), Path("/etc/apt/sources.list.d/debian.sources"))
    return [str(file) for file in files if file.is_file() and file.stat().st_size]
