"""docs/images.md followed: each command of a section as it stands there, in a copy of what a user has."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import containers

MANUAL = containers.ROOT / "docs/images.md"


def blocks(section: str) -> list[str]:
    """The blocks of commands below a heading of the manual."""
    (text,) = re.findall(rf"^##+ {re.escape(section)}$(.*?)(?=^##|\Z)", MANUAL.read_text(), re.MULTILINE | re.DOTALL)
    return [
        "".join(line[4:] + "\n" for line in block.splitlines())
        for block in re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    ]


def follow(commands: str, place: Path, **variables: str) -> containers.Done:
    """Run the commands in the folder `place` as a user who stops at the first that fails."""
    if limits := containers.LIMITS():  # a machine whose root may not raise limits says so once, in a file
        file = place.parent / "containers.conf"
        file.write_text(f"[containers]\ndefault_ulimits = {[word for word in limits if '=' in word]}\n")
        variables["CONTAINERS_CONF"] = str(file)
    home = place.parent / "home"
    home.mkdir(exist_ok=True)
    # What is made by root here is UID 1000's for a user.
    script = f"own() {{ command chown -R 1000:1000 {place} {home}; }}\ntrap own DEBUG\n{commands}"
    return subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=place, env=os.environ | {"HOME": str(home)} | variables,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
