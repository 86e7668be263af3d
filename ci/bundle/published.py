"""The finished channel: what users see of the one that is built in the work folder, once all of it has passed."""

from __future__ import annotations

import shutil
from pathlib import Path

from bundle.folders import checksum_of


def files(channel: Path) -> dict[str, str]:
    """The checksums of the packages in the folders of `channel`, by their places."""
    return {str(path.relative_to(channel)): checksum_of(path) for path in sorted(channel.glob("*/*.conda"))}


def publish(staged: Path, channel: Path) -> None:
    """Make `channel` hold what `staged` holds. A copy that fails, as on a full disk, leaves it as it was.

    Packages come before the index that names them, and go after it: whoever reads it meanwhile finds each of them.
    """
    wanted = [path.relative_to(staged) for path in sorted(staged.glob("*/*")) if path.is_file()]
    made: dict[Path, Path] = {}  # where each is copied to first
    try:
        for place in sorted(wanted, key=lambda path: (path.suffix != ".conda", path)):
            source, target = staged / place, channel / place
            if target.is_file() and checksum_of(target) == checksum_of(source):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            made[target] = target.with_name(f".{target.name}.new")
            shutil.copy2(source, made[target])
        for target, aside in made.items():
            aside.replace(target)
    except BaseException:
        for aside in made.values():
            aside.unlink(missing_ok=True)
        raise
    for path in channel.glob("*/*"):
        if path.is_file() and path.relative_to(channel) not in wanted:
            path.unlink()
