"""What data layers read, from records to batches."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import PIL.Image
import pytest
from numpy.typing import NDArray

from bascule_caffe.data import Batches, Feed, Share
from bascule_caffe.errors import FileError, NetError
from bascule_caffe.messages import Datum, NetParameter, TransformationParameter, array_blob, parse_string, write_binary
from bascule_caffe.net import Net
from bascule_caffe.records import LMDB, HDF5Files, ImageFiles
from bascule_caffe.transform import Transform, decode, resize

IMAGES = np.random.default_rng(0).integers(0, 256, (10, 3, 6, 5), dtype=np.uint8)


def write_lmdb(path: Path, images: NDArray[Any] = IMAGES) -> Path:
    with lmdb.open(str(path), map_size=1 << 24) as environment, environment.begin(write=True) as transaction:
        for number, image in enumerate(images):
            channels, height, width = image.shape
            datum: Any = Datum(channels=channels, height=height, width=width, data=image.tobytes(), label=number)
            transaction.put(f"{number:08}".encode(), datum.SerializeToString())
    return path


def net_of(layer: str, phase: str = "TRAIN", share: Share | None = None) -> Net:
    return Net(parse_string(f"layer {{ {layer} }}", NetParameter, "net.prototxt"), phase, data=Feed(share or Share()))


def data_layer(path: Path, batch: int, transform: str = "") -> str:
    return (
        f'name: "data" type: "Data" top: "data" top: "label" transform_param {{ {transform} }} '
        f'data_param {{ source: "{path}" batch_size: {batch} backend: LMDB }}'
    )


def test_an_lmdb_comes_in_order_and_again_from_its_beginning(tmp_path: Path) -> None:
    net = net_of(data_layer(write_lmdb(tmp_path / "lmdb"), 4))
    labels = [net()["label"].tolist() for _ in range(4)]
    assert labels == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5]]
    np.testing.assert_array_equal(net()["data"].numpy(), IMAGES[6:10])
    net.close()


def test_ranks_read_every_record_once(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "lmdb")
    nets = [net_of(data_layer(path, 2), share=Share(rank, 2)) for rank in range(2)]
    assert [net()["label"].tolist() for _ in range(2) for net in nets] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    for net in nets:
        net.close()


def test_a_batch_depends_on_its_number_alone(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "lmdb")
    records = LMDB(str(path))
    transform = Transform(TransformationParameter(crop_size=3, mirror=True), training=True)
    batches = Batches(records, 4, Share(seed=5), "data", transform, shuffle=True)
    first = [batches.make(number) for number in range(6)]
    for number in (4, 1, 5, 0):
        for one, other in zip(batches.make(number), first[number], strict=True):
            assert one.equal(other)
    # Each epoch is a new order of all records; the crops differ.
    labels = np.concatenate([batch[1].numpy() for batch in first])
    assert sorted(labels[:10]) == sorted(labels[10:20]) == list(range(10))
    assert labels[:10].tolist() != labels[10:20].tolist()


def test_a_source_goes_on_where_it_is_told(tmp_path: Path) -> None:
    feed = Feed()
    layer = data_layer(write_lmdb(tmp_path / "lmdb"), 3)
    net = Net(parse_string(f"layer {{ {layer} }}", NetParameter), "TRAIN", data=feed)
    net()
    feed.seek(3)
    assert net()["label"].tolist() == [9, 0, 1]
    net.close()


@pytest.mark.parametrize("training", [True, False])
def test_a_transform_crops_mirrors_subtracts_and_scales(training: bool) -> None:
    image = IMAGES[0]
    mean = np.random.default_rng(1).normal(size=image.shape).astype(np.float32)
    transform = Transform(TransformationParameter(crop_size=4, mirror=True, scale=0.5), training, mean)
    whole = (image - mean) * np.float32(0.5)
    tops, lefts = (range(3), range(2)) if training else ([1], [0])
    windows = [whole[:, top : top + 4, left : left + 4] for top in tops for left in lefts]
    windows += [window[:, :, ::-1] for window in windows]
    seen = set()
    for seed in range(100):
        result = transform.apply(image, lambda seed=seed: np.random.default_rng(seed))  # type: ignore[misc]
        seen |= {number for number, window in enumerate(windows) if np.array_equal(window, result)}
    assert seen == set(range(len(windows)))


def test_mean_values_are_one_for_each_channel_or_one_for_all() -> None:
    for values in ([3.0], [1.0, 2.0, 3.0]):
        result = Transform(TransformationParameter(mean_value=values), True).apply(IMAGES[0], np.random.default_rng)
        np.testing.assert_array_equal(result, IMAGES[0] - np.array(values, np.float32).reshape(-1, 1, 1))
    with pytest.raises(ValueError, match="2 values of mean_value for 3 channels"):
        Transform(TransformationParameter(mean_value=[1, 2]), True).apply(IMAGES[0], np.random.default_rng)


def test_a_mean_file_is_subtracted(tmp_path: Path) -> None:
    mean = IMAGES.astype(np.float32).mean(axis=0, keepdims=True)
    write_binary(tmp_path / "mean.binaryproto", array_blob(mean))
    path = write_lmdb(tmp_path / "lmdb")
    net = net_of(data_layer(path, 2, f'mean_file: "{tmp_path / "mean.binaryproto"}"'))
    np.testing.assert_array_equal(net()["data"].numpy(), IMAGES[:2] - mean)
    net.close()


def png(image: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def test_an_image_file_has_its_channels_as_opencv_has_them() -> None:
    cv2 = pytest.importorskip("cv2")
    pixels = np.random.default_rng(2).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    blue_first = cv2.imdecode(np.frombuffer(png(pixels), np.uint8), cv2.IMREAD_COLOR)
    np.testing.assert_array_equal(decode(png(pixels), True), blue_first.transpose(2, 0, 1))
    for height, width in ((20, 15), (64, 48), (33, 70)):
        right = cv2.resize(blue_first, (width, height)).transpose(2, 0, 1)
        assert np.abs(resize(decode(png(pixels)), height, width).astype(int) - right).max() <= 1


def test_a_grey_image_of_16_bits_is_its_high_bytes_as_opencv_has_it() -> None:
    cv2 = pytest.importorskip("cv2")
    file = png(np.arange(0, 65536, 257 * 8, dtype=np.uint16).reshape(1, -1))
    wanted = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_GRAYSCALE)
    assert len(np.unique(wanted)) == 32
    for color, channels in ((None, 1), (False, 1), (True, 3)):
        np.testing.assert_array_equal(decode(file, color), np.stack([wanted] * channels))
    tiff = io.BytesIO()
    PIL.Image.fromarray(np.full((2, 2), 0.5, np.float32)).save(tiff, "TIFF")
    with pytest.raises(ValueError, match="no grey levels of 8 or 16 bits"):
        decode(tiff.getvalue())


def test_image_data_reads_the_files_of_a_list(tmp_path: Path) -> None:
    for number in range(4):
        grey = np.full((8, 8), 50 * number, np.uint8)
        (tmp_path / f"image {number}.png").write_bytes(png(grey))
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"image {number}.png {number}\n" for number in range(4)))
    net = net_of(
        f'name: "d" type: "ImageData" top: "data" top: "label" image_data_param {{ source: "{listed}" batch_size: 3 '
        f'root_folder: "{tmp_path}/" new_height: 4 new_width: 6 is_color: false }}'
    )
    outputs = net()
    assert outputs["data"].shape == (3, 1, 4, 6)
    assert outputs["data"][:, 0, 0, 0].tolist() == [0, 50, 100]
    assert outputs["label"].tolist() == [0, 1, 2]
    net.close()


def test_hdf5_data_reads_data_sets_with_the_names_of_the_tops(tmp_path: Path) -> None:
    for number, rows in enumerate((3, 2)):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = np.arange(rows * 2).reshape(rows, 2) + 100 * number
            file["y"] = np.arange(rows) + 10 * number
    listed = tmp_path / "list.txt"
    listed.write_text(f"{tmp_path}/0.h5\n{tmp_path}/1.h5\n")
    net = net_of(f'name: "d" type: "HDF5Data" top: "y" top: "x" hdf5_data_param {{ source: "{listed}" batch_size: 4 }}')
    outputs = net()
    assert outputs["y"].tolist() == [0, 1, 2, 10]
    assert outputs["x"].tolist() == [[0, 1], [2, 3], [4, 5], [100, 101]]
    assert net()["y"].tolist() == [11, 0, 1, 2]
    net.close()
    order = HDF5Files(str(listed), ["y"]).order(np.random.default_rng(3)).tolist()
    assert sorted(order) == list(range(5))
    assert set(order[:3]) == {0, 1, 2} or set(order[:2]) == {3, 4}  # a file at a time


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.array(["cat", "dog"], dtype=object), "has text, but must have real numbers"),
        (np.array([b"cat", b"dog"]), "has text, but must have real numbers"),
        (np.array([1j, 2j]), "has complex numbers, but must have real numbers"),
        (np.zeros(2, [("a", "f4"), ("b", "f4")]), r"has values of type \[\('a'.*, but must have real numbers"),
        (np.float32(3), "has no axes"),
        (np.zeros((0, 2)), "has no rows"),
        (None, "is a group"),
    ],
)
def test_hdf5_data_that_has_no_rows_of_numbers_is_named(tmp_path: Path, labels: Any, words: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros((len(labels) if np.ndim(labels) else 2, 4))
        if labels is None:
            file.create_group("y")
        else:
            file["y"] = labels
    listed = tmp_path / "list.txt"
    listed.write_text(f"{tmp_path}/a.h5\n")
    fields = f'hdf5_data_param {{ source: "{listed}" batch_size: 1 }}'
    tops = 'top: "y" top: "x"'
    with pytest.raises(FileError, match=rf"layer 'd' \(HDF5Data\): .*a\.h5: data set 'y' {words}"):
        net_of(f'name: "d" type: "HDF5Data" {tops} {fields}')


def test_memory_data_reads_the_arrays_that_it_was_given() -> None:
    feed = Feed()
    layer = """type: "MemoryData" name: "d" top: "x" top: "y"
      memory_data_param { batch_size: 2 channels: 1 height: 1 width: 1 }"""
    net = Net(parse_string(f"layer {{ {layer} }}", NetParameter), "TEST", data=feed)
    source: Any = feed.sources[0]
    source.reset(np.arange(4).reshape(4, 1, 1, 1), np.arange(4))
    assert [net()["y"].tolist() for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]
    with pytest.raises(ValueError, match=r"give data \(n, 1, 1, 1\) and labels \(n,\), n a multiple of 2"):
        source.reset(np.zeros((3, 1, 1, 1)), np.zeros(3))


def test_a_transformation_of_layers_that_have_none_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    layer = 'name: "d" type: "%s" top: "x" top: "y" transform_param { scale: 2 } %s'
    with pytest.raises(NetError, match=r"net.prototxt:1: layer 'd' \(HDF5Data\): .*does not transform data"):
        net_of(layer % ("HDF5Data", 'hdf5_data_param { source: "x" batch_size: 1 }'))
    net_of(layer % ("MemoryData", "memory_data_param { batch_size: 2 channels: 1 height: 1 width: 1 }"))
    assert "layer 'd' (MemoryData): transform_param has no effect" in capsys.readouterr().err


def test_a_truncated_lmdb_is_told(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "lmdb", np.zeros((100, 3, 32, 32), np.uint8))
    file = path / "data.mdb"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        FileError, match=r"layer 'data' \(Data\): .*is truncated: its pages need \d+ bytes, the file has"
    ):
        net_of(data_layer(path, 2))
    file.write_bytes(whole[:100])
    with pytest.raises(FileError, match="is no LMDB, or a damaged one"):
        net_of(data_layer(path, 2))


def test_a_record_that_is_no_image_is_named(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "lmdb", IMAGES[:2])
    with lmdb.open(str(path)) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"00000002", b"\xff\xff")
    net = net_of(data_layer(path, 2))
    net()
    with pytest.raises(FileError, match=r"record 2 \(key b'00000002'\) is no image"):
        net()
    net.close()


def test_an_image_with_a_negative_height_is_named(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "lmdb", IMAGES[:1])
    with lmdb.open(str(path)) as environment, environment.begin(write=True) as transaction:
        datum: Any = Datum(channels=3, height=-6, width=5, data=IMAGES[1].tobytes(), label=1)
        transaction.put(b"00000001", datum.SerializeToString())
    net = net_of(data_layer(path, 1))
    net()
    with pytest.raises(FileError, match=r"record 1 .*channels, height and width are \(3, -6, 5\), but must be above 0"):
        net()
    net.close()


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ('type: "Data" data_param { source: "nowhere" batch_size: 1 backend: LMDB }', "nowhere: no such folder"),
        (
            'type: "Data" data_param { source: "old" batch_size: 1 }',
            "LEVELDB, which is not read here: copy the records",
        ),
        ('type: "HDF5Data" hdf5_data_param { source: "nowhere" batch_size: 1 }', "source nowhere cannot be read"),
        ('type: "ImageData" image_data_param { source: "nowhere" batch_size: 1 }', "source nowhere cannot be read"),
    ],
)
def test_a_source_that_is_not_there_is_told_with_its_layer(layer: str, words: str) -> None:
    with pytest.raises(FileError, match=f"net.prototxt:1: layer 'd' .*{words}"):
        net_of(f'name: "d" top: "x" {layer}')


def test_images_of_different_shapes_need_a_crop(tmp_path: Path) -> None:
    for name, size in (("a", 8), ("b", 9)):
        (tmp_path / f"{name}.png").write_bytes(png(np.zeros((size, size), np.uint8)))
    listed = tmp_path / "list.txt"
    listed.write_text(f"{tmp_path}/a.png 0\n{tmp_path}/b.png 1\n")
    records = ImageFiles(str(listed), "", (0, 0), True)
    with pytest.raises(FileError, match=r"record 1 has shape \(3, 9, 9\), and the first one \(3, 8, 8\)"):
        Batches(records, 2, Share(), "d").make(0)
