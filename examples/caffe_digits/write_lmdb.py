"""Writes scikit-learn's handwritten digits as LMDBs, as Caffe's convert_imageset did: digits_train and digits_test."""

from __future__ import annotations

import lmdb
import numpy as np
from sklearn.datasets import load_digits

from bascule_caffe.messages import Datum

TRAIN = 1500  # images; the other 297 are for the test


def main() -> None:
    """Each record is a Datum: 1 x 8 x 8 bytes from 0 to 255, and the digit."""
    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    for name, rows in (("digits_train", range(TRAIN)), ("digits_test", range(TRAIN, len(images)))):
        with lmdb.open(name, map_size=1 << 24) as environment, environment.begin(write=True) as transaction:
            for row in rows:
                datum = Datum(channels=1, height=8, width=8, data=images[row].tobytes(), label=int(digits.target[row]))
                transaction.put(f"{row:08}".encode(), datum.SerializeToString())
        print(f"{name}: {len(rows)} images")


if __name__ == "__main__":
    main()
