"""The same image without what one build writes into it, so that the same content has the same id. Pure.

podman and buildah date an image as they are told, and still name in its configuration the containers that they built
it in and the images between. An image is only its layers and its configuration: written anew without these names, as a
folder that both read, it is taken in without copying a layer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]
_KEPT = ("architecture", "os", "created", "config", "history", "rootfs")
_SETTINGS = {
    *("User", "ExposedPorts", "Env", "Entrypoint", "Cmd", "Volumes", "WorkingDir", "Labels", "StopSignal", "OnBuild"),
    *("Shell", "Healthcheck"),
}


def of_podman(inspected: Json) -> dict[str, bytes]:
    """The files of the folder, of one image as `podman image inspect` tells of it."""
    config = {**inspected["Config"], "Healthcheck": inspected.get("Healthcheck")}
    return _folder(
        {
            "architecture": inspected["Architecture"],
            "os": inspected["Os"],
            "created": inspected["Created"],
            "config": config,
            "history": inspected["History"],
            "rootfs": {"type": "layers", "diff_ids": inspected["RootFS"]["Layers"]},
        }
    )


def of_buildah(inspected: Json) -> dict[str, bytes]:
    """The files of the folder, of one image as `buildah inspect --type image` tells of it."""
    return _folder({key: inspected["Docker"][key] for key in _KEPT})


def _folder(config: dict[str, Any]) -> dict[str, bytes]:
    """In the form of containers' transport `dir:`, without its layers, which are there already."""
    steps = [{key: value for key, value in step.items() if value and key != "comment"} for step in config["history"]]
    settings = {key: value for key, value in config["config"].items() if value and key in _SETTINGS}
    blob = _bytes(config | {"config": settings, "history": steps})
    digest = hashlib.sha256(blob).hexdigest()
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {
            "mediaType": "application/vnd.docker.container.image.v1+json",
            "size": len(blob),
            "digest": f"sha256:{digest}",
        },
        "layers": [
            {"mediaType": "application/vnd.docker.image.rootfs.diff.tar", "size": 0, "digest": layer}
            for layer in config["rootfs"]["diff_ids"]
        ],
    }
    return {"version": b"Directory Transport Version: 1.1\n", "manifest.json": _bytes(manifest), digest: blob}


def _bytes(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
