from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import data
import pytest
import torch

pytestmark = pytest.mark.timeout(300)  # the first test of a resolution prepares it, reading nilearn from a cold disk


def test_there_are_four_classes_in_the_shares_of_a_brain(folder: Path) -> None:
    volume = data.load(4, folder=folder)
    shares = volume.fractions()
    assert list(shares) == ["background", "other", "grey", "white"]
    assert sum(shares.values()) == pytest.approx(1)
    litres = {name: share * volume.truth.numel() * 4**3 / 1e6 for name, share in shares.items()}
    # An adult's brain: 1.2 to 2.0 litres, more grey than white matter, and some fluid.
    assert 1.2 < litres["grey"] + litres["white"] + litres["other"] < 2.0
    assert litres["grey"] > litres["white"] > litres["other"] > 0.05


def test_grey_matter_is_darker_than_white_and_brighter_than_fluid(folder: Path) -> None:
    volume = data.load(4, folder=folder)
    background, other, grey, white = (volume.image[0, 0][volume.truth == number].mean().item() for number in range(4))
    assert background < other < grey < white


def test_the_brain_alone_has_mean_zero_and_deviation_one(folder: Path) -> None:
    volume = data.load(4, folder=folder)
    inside = volume.image[0, 0][volume.truth > 0]
    assert inside.mean().item() == pytest.approx(0, abs=1e-4)
    assert inside.std().item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("multiple", [1, 8, 16])
def test_each_side_is_padded_to_the_multiple_with_background(folder: Path, multiple: int) -> None:
    volume = data.load(4, multiple, folder)
    assert volume.image.shape == (1, 1, *volume.truth.shape)
    assert volume.image.dtype == torch.float32
    for axis, (side, before) in enumerate(zip(volume.truth.shape, volume.unpadded, strict=True)):
        assert side % multiple == 0
        assert before <= side < before + multiple
        assert not volume.truth.narrow(axis, before, side - before).any()


def test_finer_voxels_show_the_same_brain(folder: Path) -> None:
    coarse, fine = data.load(4, 1, folder), data.load(2, 1, folder)
    for name, share in coarse.fractions().items():
        brain = share * coarse.truth.numel() * 4**3
        assert name == "background" or fine.fractions()[name] * fine.truth.numel() * 2**3 == pytest.approx(
            brain, rel=0.1
        )


def test_another_resolution_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ValueError, match="resolution=3: expected one of 4, 2, 1"):
        data.load(3, folder=folder)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(data.DataError, match=f"{blocked}.*--data names another folder"):
        data.load(4, folder=blocked)


def test_a_training_process_never_imports_nilearn(folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; import data; data.load(4, folder=Path(sys.argv[1])); "
        "sys.exit('nilearn' in sys.modules or 'pandas' in sys.modules)"
    )
    here = Path(data.__file__).parent
    assert subprocess.run([sys.executable, "-c", program, str(folder)], cwd=here, check=False).returncode == 0
