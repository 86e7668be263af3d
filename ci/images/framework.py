"""What is the same in an image from commit to commit, kept as an image of its own."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from bundle.folders import write
from images import containerfile
from images.engine import Build, Engine

STAGE = "framework"  # of the Containerfile
_ARGUMENTS = ("ENV_ARCH", "PACKAGES")  # of this stage, besides the base image


def build(wanted: Build, chosen: Engine) -> str:
    """Build an image, from its framework where that is there from an earlier build; its id. Raises ImageError."""
    if chosen.keeps_stages:
        return chosen.build(wanted)
    first, second = containerfile.halves(wanted.containerfile.read_text(), STAGE)
    below = str(chosen.image_id(wanted.arguments["BASE_IMAGE"]))
    given = (wanted.arguments[name] for name in _ARGUMENTS)
    parts = (first, (wanted.context / "framework.lock").read_text(), below, *given)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    kept = wanted.context.parent / "framework.image"
    found = kept.read_text().split() if kept.is_file() else []
    if not (wanted.cache and found[:1] == [key] and chosen.image_id(found[1])):
        found = [key, chosen.build_stage(STAGE, wanted)]
        write(kept, " ".join(found))
    file = wanted.context.parent / "Containerfile"
    file.write_text(f"FROM {found[1]}\n{second}")
    return chosen.build(replace(wanted, containerfile=file, cache=False), layers=False)
