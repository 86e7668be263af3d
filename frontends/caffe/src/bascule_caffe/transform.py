"""Caffe's transform_param: crop, mirror, subtract a mean, scale."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray

from bascule_caffe.errors import NetError

Image = NDArray[Any]  # (channels, height, width); channels are blue, green, red


class Transform:
    """What one layer does with each image.

    `mean` is a mean image of shape (C, H, W), or None. `training`: crops lie anywhere, else in the middle. Raises
    NetError for fields that exclude each other.
    """

    def __init__(self, param: Any, training: bool, mean: Image | None = None) -> None:
        if param.mean_value and param.mean_file:
            raise NetError("transform_param has mean_file and mean_value: give one of them")
        self.crop, self.mirror, self.scale = int(param.crop_size), bool(param.mirror), np.float32(param.scale)
        self.training = training
        self.mean = mean
        self.values = np.array(param.mean_value, dtype=np.float32).reshape(-1, 1, 1)

    def apply(self, image: Image, generator: Callable[[], np.random.Generator]) -> NDArray[np.float32]:
        """The image as float32. `generator` makes the random numbers of this image, if it needs some.

        Raises ValueError if the crop, the mean image or the mean values do not fit the image.
        """
        channels, *sides = image.shape
        if self.crop > min(sides):
            raise ValueError(f"crop_size {self.crop} is larger than the images of {sides[0]}x{sides[1]}")
        if self.mean is not None and self.mean.shape != image.shape:
            raise ValueError(f"the mean image has shape {self.mean.shape}, and the images have {image.shape}")
        count = len(self.values)
        if count not in (0, 1, channels):
            raise ValueError(f"there are {count} values of mean_value for {channels} channels: give 1 or all")
        chance = generator() if self.mirror or (self.training and self.crop) else None
        window = [slice(None)]
        for side in sides:
            size = self.crop or side
            begin = (
                int(chance.integers(side - size + 1)) if self.training and self.crop and chance else (side - size) // 2
            )
            window.append(slice(begin, begin + size))
        result = image[tuple(window)].astype(np.float32)
        if self.mean is not None:
            result -= self.mean[tuple(window)]
        elif len(self.values):
            result -= self.values
        if self.scale != 1:
            result *= self.scale
        if self.mirror and chance and chance.integers(2):
            result = result[:, :, ::-1]
        return result


def decode(data: bytes, color: bool | None = None) -> Image:
    """A JPEG or PNG file as (C, H, W) of uint8, channels blue, green, red.

    `color`: True makes three channels, False one, None what the file has. Raises ValueError for what is no image.
    """
    try:
        with PIL.Image.open(io.BytesIO(data)) as opened:
            deep = opened.mode.startswith("I")  # grey levels of 16 bits
            grey = opened.mode in ("1", "L") or deep if color is None else not color
            levels = np.asarray(opened) if deep else np.zeros(1, np.int32)
            if opened.mode == "F" or levels.max() > 0xFFFF or levels.min() < 0:
                raise ValueError("its numbers are no grey levels of 8 or 16 bits: use HDF5Data")
            # The high byte, as OpenCV takes it; Pillow would make everything above 255 white.
            image: PIL.Image.Image = PIL.Image.fromarray((levels >> 8).astype(np.uint8)) if deep else opened
            pixels = np.asarray(image.convert("L" if grey else "RGB"))
    except (OSError, SyntaxError) as error:  # Pillow raises SyntaxError for a damaged PNG
        raise ValueError(f"no image can be read ({error})") from None
    return pixels[np.newaxis] if grey else np.ascontiguousarray(pixels[:, :, ::-1].transpose(2, 0, 1))


def resize(image: Image, height: int, width: int) -> Image:
    """Bilinear, without a filter for smaller images, as OpenCV's INTER_LINEAR; at most one grey level apart from it."""
    if image.shape[1:] == (height, width):
        return image
    source = torch.from_numpy(np.array(image, dtype=np.float32, order="C")).unsqueeze(0)
    scaled = torch.nn.functional.interpolate(source, size=(height, width), mode="bilinear", align_corners=False)
    result: Image = scaled[0].round().clamp(0, 255).to(torch.uint8).numpy()
    return result
