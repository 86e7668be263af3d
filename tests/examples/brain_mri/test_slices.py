from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import slices
import torch
from data import CLASSES, Volume
from matplotlib import pyplot
from matplotlib.figure import Figure

UNPADDED = (16, 10, 12)


@pytest.fixture(scope="module")
def volume() -> Volume:
    """Noise, padded by something that must never be seen."""
    noise = torch.Generator().manual_seed(0)
    image, truth = torch.full((1, 1, 16, 16, 16), 99.0), torch.full((16, 16, 16), 99)
    inside = tuple(slice(side) for side in UNPADDED)
    image[0, 0][inside] = torch.randn(UNPADDED, generator=noise)
    truth[inside] = torch.randint(len(CLASSES), UNPADDED, generator=noise)
    return Volume(image, truth, 4, UNPADDED)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were written."""
    figures: list[Figure] = []
    whole = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self) or whole(self, *a, **k))
    return figures


def test_each_cut_shows_image_truth_and_prediction_without_the_padding(
    tmp_path: Path, volume: Volume, drawn: list[Figure]
) -> None:
    prediction = (volume.truth + 1) % len(CLASSES)
    prediction[UNPADDED[0] :] = 99
    path = tmp_path / "folder that is not there yet" / "slices.png"
    slices.plot(path, volume, prediction, "after 3 steps")
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = drawn
    assert figure.get_suptitle() == "after 3 steps"
    x, y, z = (slice(side) for side in UNPADDED)
    cuts = {"axial": (x, y, 6), "coronal": (x, 5, z), "sagittal": (9, y, z)}  # the last is beside the midline
    whole = {"image": volume.image[0, 0], "truth": volume.truth, "prediction": prediction}
    expected = {f"{cut}, {what}": whole[what][where].T for cut, where in cuts.items() for what in whole}
    shown = {axes.get_title(): torch.from_numpy(axes.images[0].get_array().filled()) for axes in figure.axes}
    assert list(shown) == list(expected)
    for title, pixels in shown.items():
        assert torch.equal(pixels, expected[title]), title
    assert all(axes.images[0].origin == "lower" for axes in figure.axes), "the head is upright"
    assert not any(axes.axison for axes in figure.axes), "voxels need no scale"


def test_a_class_has_one_colour_in_the_pictures_and_in_the_legend(
    tmp_path: Path, volume: Volume, drawn: list[Figure]
) -> None:
    slices.plot(tmp_path / "slices.png", volume, torch.zeros_like(volume.truth), "")
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == list(CLASSES)
    prediction = drawn[0].axes[2].images[0]
    colours = [tuple(prediction.cmap(prediction.norm(number))) for number in range(len(CLASSES))]
    assert [patch.get_facecolor() for patch in legend.get_patches()] == colours
    assert len(set(colours)) == len(CLASSES)


def test_the_suffix_says_the_format_and_no_figure_stays_open(tmp_path: Path, volume: Volume) -> None:
    before = pyplot.get_fignums()
    path = tmp_path / "slices.svg"
    slices.plot(path, volume, volume.truth, "")
    assert ET.parse(path).getroot().tag.endswith("svg")
    assert pyplot.get_fignums() == before
