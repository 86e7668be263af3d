"""An image without what one build writes into it."""

import hashlib
import json

from images import canonical

LAYERS = ["sha256:01", "sha256:02"]
STEP = {"created": "1980-01-01T00:00:00Z", "created_by": "RUN x"}
# An image, as each of them tells of it.
PODMAN = {
    "Architecture": "amd64", "Os": "linux", "Created": "1980-01-01T00:00:00Z", "Config": {"User": "1000"},
    "Healthcheck": {"Test": ["CMD", "x"]}, "History": [{**STEP, "comment": "FROM 77"}], "RootFS": {"Layers": LAYERS},
    "Parent": "77",
}  # fmt: skip
BUILDAH = {
    "Docker": {
        "architecture": "amd64", "os": "linux", "created": "1980-01-01T00:00:00Z", "container": "88", "parent": "77",
        "config": {"User": "1000", "Healthcheck": {"Test": ["CMD", "x"]}},
        "history": [{**STEP, "comment": "FROM 77"}], "rootfs": {"type": "layers", "diff_ids": LAYERS},
    },
    "OCIv1": {},
}  # fmt: skip


def test_both_engines_words_for_one_image_make_one_image() -> None:
    assert canonical.of_podman(PODMAN) == canonical.of_buildah(BUILDAH)


def test_neither_containers_nor_images_between_are_named_in_it() -> None:
    for config in (canonical.of_podman(PODMAN), canonical.of_buildah(BUILDAH)):
        words = b"".join(config.values())
        assert b"FROM 77" not in words
        assert b'container"' not in words
        assert b"parent" not in words


def test_the_folder_is_whole_less_the_layers() -> None:
    files = canonical.of_podman(PODMAN)
    manifest = json.loads(files["manifest.json"])
    digest = manifest["config"]["digest"].removeprefix("sha256:")
    assert hashlib.sha256(files[digest]).hexdigest() == digest
    assert len(files[digest]) == manifest["config"]["size"]
    config = json.loads(files[digest])
    assert [layer["digest"] for layer in manifest["layers"]] == config["rootfs"]["diff_ids"] == LAYERS
    assert config["config"] == {"User": "1000", "Healthcheck": {"Test": ["CMD", "x"]}}
    assert len(config["history"]) == 1


def test_an_image_without_a_health_check_gets_none() -> None:
    files = canonical.of_podman(PODMAN | {"Healthcheck": None})
    assert b"Healthcheck" not in b"".join(files.values())
