"""A whole-brain MRI with four classes: the ICBM 152 template and its tissue maps, as the nilearn package ships them.

The template is an average of 152 healthy adults (Fonov et al., "Unbiased nonlinear average age-appropriate brain
templates from birth to adulthood", NeuroImage 47, 2009), with the skull already removed. It is one brain, and an
averaged one: fitting it shows that training works, and says nothing about how a model generalises.

    python examples/brain_mri/data.py --resolution 2      # prepares the volume and prints what is in it
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

CLASSES = ("background", "other", "grey", "white")
RESOLUTIONS = (4, 2, 1)  # mm
FOLDER = Path(__file__).resolve().parents[2] / "out" / "brain_mri"

_BRAIN = 0.2  # of the brightest voxel: nilearn's own threshold for its brain mask
_TISSUE = 0.5  # of the map's greatest probability
_FORMAT = 1  # counted up whenever `_prepare` gives other numbers


class DataError(RuntimeError):
    """The volume could not be made or read. The message says what to do."""


@dataclass(frozen=True)
class Arrays:
    """A brain without a framework: `image` is (x, y, z), of the brain's mean 0 and variance 1; `truth` as in Volume."""

    image: NDArray[np.float32]
    truth: NDArray[np.int64]
    unpadded: tuple[int, int, int]  # the shape before the padding


@dataclass(frozen=True)
class Volume:
    """A brain: `image` is float32 (1, 1, x, y, z), `truth` the class of each voxel as int64 (x, y, z)."""

    image: torch.Tensor
    truth: torch.Tensor
    resolution: int  # mm a voxel
    unpadded: tuple[int, int, int]  # the shape before the padding

    def fractions(self) -> dict[str, float]:
        """Share of the voxels in each class."""
        counts = self.truth.flatten().bincount(minlength=len(CLASSES)).tolist()
        return {name: count / self.truth.numel() for name, count in zip(CLASSES, counts, strict=True)}


def load(resolution: int, multiple: int = 8, folder: Path = FOLDER) -> Volume:
    """The whole brain at `resolution` mm (4, 2 or 1), each side padded with background to a multiple of `multiple`.

    The resampled volume is kept in `folder`. Raises DataError when it cannot be made, ValueError for other resolutions.
    """
    import torch

    brain = load_arrays(resolution, multiple, folder)
    return Volume(torch.from_numpy(brain.image)[None, None], torch.from_numpy(brain.truth), resolution, brain.unpadded)


def load_arrays(resolution: int, multiple: int = 8, folder: Path = FOLDER) -> Arrays:
    """As `load`, without PyTorch."""
    image, truth = _prepared(resolution, folder)
    unpadded = image.shape
    padding = [(0, -side % multiple) for side in unpadded]
    image, truth = np.pad(image, padding), np.pad(truth, padding)  # 0 is both black and the background's class
    inside = image[truth > 0]
    image = (image - inside.mean()) / inside.std()  # of the brain alone: how much air is around it must not matter
    return Arrays(image, truth.astype(np.int64), (unpadded[0], unpadded[1], unpadded[2]))


def _prepared(resolution: int, folder: Path) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    if resolution not in RESOLUTIONS:
        raise ValueError(f"resolution={resolution}: expected one of {', '.join(map(str, RESOLUTIONS))} (mm)")
    try:
        version = metadata.version("nilearn")
    except metadata.PackageNotFoundError:
        raise DataError("the MRI comes with the nilearn package, which is not installed: pip install nilearn") from None
    path = folder / f"mni152-{resolution}mm-format{_FORMAT}-nilearn{version}.npz"
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot keep the MRI in {folder}, --data names another folder: {error.strerror}") from None
        # In a process of its own: nilearn and what it imports (pandas, scikit-learn) would stay resident in the
        # training process for nothing, a hundred megabytes of the very memory that this example is about.
        command = [sys.executable, __file__, "--resolution", str(resolution), "--write", str(path)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            raise DataError(f"cannot prepare the MRI in {folder} (--data names another folder): {reason[0]}")
    with np.load(path) as arrays:
        return arrays["image"], arrays["truth"]


def _prepare(resolution: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """The image, its brightest voxel about 1, and the class of each voxel."""
    from nilearn import datasets

    image, grey, white = (
        np.asarray(template(resolution=resolution).dataobj, dtype=np.float32)
        for template in (
            datasets.load_mni152_template,
            datasets.load_mni152_gm_template,
            datasets.load_mni152_wm_template,
        )
    )
    truth = np.zeros(image.shape, dtype=np.uint8)
    truth[image > _BRAIN] = CLASSES.index("other")  # ventricles, fluid, and what neither map claims for itself
    truth[(grey >= white) & (grey > _TISSUE)] = CLASSES.index("grey")
    truth[(white > grey) & (white > _TISSUE)] = CLASSES.index("white")
    return image, truth


def _write(path: Path, image: NDArray[np.float32], truth: NDArray[np.uint8]) -> None:
    """Written aside and renamed: of two processes that prepare the same volume, each reads a whole one."""
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, image=image, truth=truth)
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise


def main() -> int:
    """Prepare a volume and print its shape and classes."""
    parser = argparse.ArgumentParser(description="prepares the whole-brain MRI that the example trains on")
    parser.add_argument("--resolution", type=int, choices=RESOLUTIONS, default=4, help="mm a voxel (default 4)")
    parser.add_argument("--data", type=Path, default=FOLDER, metavar="DIR", help="where the volume is kept")
    parser.add_argument("--write", type=Path, metavar="FILE", help="prepare it into FILE, and nothing else")
    args = parser.parse_args()
    if args.write:
        _write(args.write, *_prepare(args.resolution))
        return 0
    try:
        volume = load(args.resolution, folder=args.data)
    except DataError as error:
        print(f"data.py: {error}", file=sys.stderr)
        return 1
    print(f"{' x '.join(map(str, volume.unpadded))} voxels of {volume.resolution} mm,", end=" ")
    print(f"padded to {' x '.join(map(str, volume.truth.shape))}")
    for name, share in volume.fractions().items():
        print(f"  {name:<12}{share:7.2%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
