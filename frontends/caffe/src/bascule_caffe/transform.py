"""Caffe's transform_param: crop, mirror, subtract a mean, scale."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Image = NDArray[Any]  # (channels, height, width); channels are blue, green, red


class Transform:
    """What one layer does with each image.

    `mean` is a mean image of shape (C, H, W), or None. `training`: crops lie anywhere, else in the middle. Raises
    ValueError for fields that exclude each other.
    """

    def __init__(self, param: Any, training: bool, mean: Image | None = None) -> None:
        if param.mean_value and param.mean_file:
            raise ValueError("transform_param has mean_file and mean_value: give one of them")
        self.crop, self.mirror, self.scale = int(param.crop_size), bool(param.mirror), np.float32(param.scale)
        self.training = training
        self.mean = mean
        self.values = np.array(param.mean_value, dtype=np.float32).reshape(-1, 1, 1)

    @property
    def random(self) -> bool:
        """Whether a result depends on chance."""
        return self.mirror or (self.training and self.crop > 0)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the result for images of `shape` (C, H, W). Raises ValueError if they do not fit."""
        channels, height, width = shape
        if self.crop > min(height, width):
            raise ValueError(f"crop_size {self.crop} is larger than the images of {height}x{width}")
        if self.mean is not None and self.mean.shape != shape:
            raise ValueError(f"the mean image has shape {self.mean.shape}, and the images have {shape}")
        if len(self.values) not in (0, 1, channels):
            raise ValueError(
                f"there are {len(self.values)} values of mean_value for {channels} channels: give 1 or all"
            )
        return (channels, self.crop or height, self.crop or width)

    def apply(self, image: Image, generator: Callable[[], np.random.Generator]) -> NDArray[np.float32]:
        """The image as float32. `generator` makes the random numbers of this image, if it needs some."""
        _, height, width = image.shape
        chance = generator() if self.random else None
        top = left = 0
        size = self.crop
        if size:
            top, left = (height - size) // 2, (width - size) // 2
            if self.training and chance is not None:
                top, left = (int(chance.integers(room + 1)) for room in (height - size, width - size))
        window = (slice(None), slice(top, top + size or None), slice(left, left + size or None))
        result = image[window].astype(np.float32)
        if self.mean is not None:
            result -= self.mean[window]
        elif len(self.values):
            result -= self.values
        if self.scale != 1:
            result *= self.scale
        if self.mirror and chance is not None and chance.integers(2):
            result = result[:, :, ::-1]
        return result


def decode(data: bytes, color: bool | None = None) -> Image:
    """A JPEG or PNG file as (C, H, W) of uint8, channels blue, green, red.

    `color`: True makes three channels, False one, None what the file has. Raises ValueError for what is no image, and
    ModuleNotFoundError without Pillow.
    """
    import PIL.Image

    try:
        with PIL.Image.open(io.BytesIO(data)) as opened:
            grey = opened.mode in ("1", "L", "I;16", "I") if color is None else not color
            pixels = np.asarray(opened.convert("L" if grey else "RGB"))
    except (OSError, SyntaxError) as error:  # Pillow raises SyntaxError for a damaged PNG
        raise ValueError(f"no image can be read ({error})") from None
    return pixels[np.newaxis] if grey else np.ascontiguousarray(pixels[:, :, ::-1].transpose(2, 0, 1))


def resize(image: Image, height: int, width: int) -> Image:
    """Bilinear, without a filter for smaller images, as OpenCV's INTER_LINEAR; at most one grey level apart from it."""
    if image.shape[1:] == (height, width):
        return image
    import torch

    source = torch.from_numpy(np.array(image, dtype=np.float32, order="C")).unsqueeze(0)
    scaled = torch.nn.functional.interpolate(source, size=(height, width), mode="bilinear", align_corners=False)
    result: Image = scaled[0].round().clamp(0, 255).to(torch.uint8).numpy()
    return result
