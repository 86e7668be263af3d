"""The picture of a segmentation: three slices through the middle of the brain, each as image, truth and prediction."""

from __future__ import annotations

from pathlib import Path

import torch
from data import CLASSES, Volume

_COLOURS = ("#000000", "#0072B2", "#999999", "#FFFFFF")  # of CLASSES; fluid is blue, tissues have their own names


def plot(path: Path, volume: Volume, prediction: torch.Tensor, title: str) -> None:
    """Write the picture to `path` (its suffix says the format). `prediction` holds a class for each voxel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.patches import Patch

    x, y, z = volume.unpadded
    image = volume.image[0, 0, :x, :y, :z].cpu().numpy()
    truth = volume.truth[:x, :y, :z].cpu().numpy()
    predicted = prediction[:x, :y, :z].cpu().numpy()
    cuts = (("axial", 2, z // 2), ("coronal", 1, y // 2), ("sagittal", 0, x // 2 + x // 16))  # beside the midline
    colours, norm = ListedColormap(_COLOURS), Normalize(0, len(CLASSES) - 1)
    figure, rows = pyplot.subplots(3, 3, figsize=(9, 9.6), layout="constrained")
    for row, (name, axis, cut) in zip(rows, cuts, strict=True):
        row[0].imshow(image.take(cut, axis).T, origin="lower", cmap="gray")
        for axes, classes in zip(row[1:], (truth, predicted), strict=True):
            axes.imshow(classes.take(cut, axis).T, origin="lower", cmap=colours, norm=norm, interpolation="nearest")
        for axes, column in zip(row, ("image", "truth", "prediction"), strict=True):
            axes.set_title(f"{name}, {column}", fontsize=9)
            axes.set_axis_off()
    handles = [Patch(facecolor=c, edgecolor="black", label=name) for c, name in zip(_COLOURS, CLASSES, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
