"""Messages as text and as binary files, and what is said of bad ones."""

import struct
from pathlib import Path

import numpy as np
import pytest

from bascule_caffe import FileError, NetError, foreign
from bascule_caffe.messages import (
    BlobProto,
    LayerParameter,
    NetParameter,
    SolverParameter,
    SolverState,
    array_blob,
    blob_array,
    format_text,
    parse_string,
    parse_text,
    read_binary,
    write_binary,
)

NET = """name: "small" # a comment with layer { in it
layer {
  name: "conv"
  type: "Convolution"
  convolution_param { num_output: 4 kernel_size: 3 pad: 1 weight_filler { type: "xavier" } }
}
layer: < name: 'pool{"' type: "Pooling"
  pooling_param < pool: AVE > >
"""


def test_a_net_from_text_knows_where_its_layers_are():
    net = parse_string(NET, NetParameter, "a.prototxt")
    assert [(layer.name, layer.location) for layer in net.layer] == [
        ("conv", "a.prototxt:2"),
        ('pool{"', "a.prototxt:7"),
    ]
    assert net.layer[0].convolution_param.pad == [1]
    assert "location" not in format_text(net)
    assert parse_string(format_text(net), NetParameter).layer[1].pooling_param.pool == 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "pad: 1",
            "padd: 1",
            r"5: layer 'conv' \(Convolution\): .* no field 'padd' \(did you mean 'pad'\?\); it has axis",
        ),
        ("AVE", "AVG", r"8: layer 'pool\{\"' \(Pooling\): 'AVG' is no pool; allowed are MAX, AVE, STOCHASTIC"),
        ("num_output: 4", "num_output: four", r"5: layer 'conv' \(Convolution\): .*four"),
        ('name: "small"', 'naam: "small"', r"1: NetParameter has no field 'naam' \(did you mean 'name'\?\)"),
        ("num_output: 4", "num_output: 4 num_output: 8", r"5: layer 'conv' \(Convolution\): 'num_output' is .* twice"),
        ("> >\n", ">\n", "Expected"),
    ],
)
def test_text_that_is_no_net_is_an_error_with_file_line_layer_and_what_is_allowed(tmp_path, old, new, said):
    path = tmp_path / "a.prototxt"
    path.write_text(NET.replace(old, new))
    with pytest.raises(NetError, match=f"a.prototxt:{said}" if said[0].isdigit() else f"a.prototxt:.*{said}"):
        parse_text(path, NetParameter)


def test_a_text_may_begin_with_a_mark_and_must_be_utf_8(tmp_path):
    path = tmp_path / "a.prototxt"
    path.write_text(NET, encoding="utf-8-sig")
    assert parse_text(path, NetParameter).name == "small"
    path.write_text("# façade\n" + NET, encoding="latin-1")
    with pytest.raises(FileError, match=r"a.prototxt: is not text in UTF-8, so save it as that: .* 0xe7"):
        parse_text(path, NetParameter)


def test_fields_of_other_branches_are_kept_as_text():
    text = """layer { name: "i" type: "Interp" interp_param {
      height: 3 # {
      note: "}" deep { x: 1 } }
      freeze: true bottom: ["a", "b"] propagate_down: [true, false] rates: [1, 2] }
    layer { name: "c" type: "Convolution" convolution_param { wrong: 1 } }"""
    with pytest.raises(NetError, match="a:5: layer 'c'"):
        parse_string(text, NetParameter, "a")
    (layer,) = parse_string(text.rpartition("layer")[0], NetParameter, "a").layer
    assert " ".join(foreign(layer, "interp_param").split()) == '{ height: 3 # { note: "}" deep { x: 1 } }'
    assert foreign(layer, "freeze") == "true"
    assert foreign(layer, "rates") == "[1, 2]"
    assert foreign(layer, "other") is None
    assert (list(layer.bottom), list(layer.propagate_down)) == (["a", "b"], [True, False])


def test_a_solver_with_a_net_in_it():
    solver = parse_string("base_lr: 0.1\nnet_param {\n layer { name: 'a' type: 'ReLU' } }", SolverParameter, "s")
    assert solver.net_param.layer[0].location == "s:3"
    assert "location" not in format_text(solver)
    assert solver.delta == np.float32(1e-8)
    assert solver.type == "SGD"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 1, 2), (0, 4)])
def test_blobs_are_arrays_and_back(tmp_path, dtype, shape):
    array = np.random.default_rng(0).normal(size=shape).astype(dtype)
    write_binary(tmp_path / "b", array_blob(array))
    again = blob_array(read_binary(tmp_path / "b", BlobProto))
    assert again.dtype == dtype
    np.testing.assert_array_equal(again, array)


def test_a_blob_has_the_bytes_of_a_packed_field(tmp_path):
    # Field 5 and 7 of a BlobProto by hand: two floats, and a shape of 2; in an old file, four numbers in its place.
    floats = b"\x2a\x08" + struct.pack("<2f", 1.5, -2)
    (tmp_path / "b").write_bytes(floats + b"\x3a\x03\x0a\x01\x02")
    assert blob_array(read_binary(tmp_path / "b", BlobProto)).tolist() == [1.5, -2]
    assert array_blob(np.array([1.5, -2], np.float32)).SerializeToString() == floats + b"\x3a\x03\x0a\x01\x02"
    (tmp_path / "b").write_bytes(b"\x08\x01\x10\x01\x18\x02\x20\x01" + floats)
    assert blob_array(read_binary(tmp_path / "b", BlobProto)).tolist() == [[[[1.5], [-2]]]]


def test_a_scalar_of_caffes_has_no_shape():
    blob = array_blob(np.array(2.5, np.float32))
    blob.ClearField("shape")
    array = blob_array(blob)
    assert (array.shape, array.item()) == ((), 2.5)


@pytest.mark.parametrize("damage", [lambda data: data[:-3], lambda data: b"", lambda data: b"\xff" * 9])
def test_a_damaged_file_is_an_error(tmp_path: Path, damage):
    path = tmp_path / "x.solverstate"
    write_binary(path, SolverState(iter=3, learned_net="a", history=[array_blob(np.ones(5))]))
    assert read_binary(path, SolverState).iter == 3
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(FileError, match=r"x.solverstate: .*SolverState"):
        read_binary(path, SolverState)
    with pytest.raises(FileError, match=r"nothing.solverstate: cannot be read"):
        read_binary(tmp_path / "nothing.solverstate", SolverState)


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(FileError, match="folder: cannot be written"):
        write_binary(path, LayerParameter(name="a"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_a_blob_whose_numbers_do_not_fit_its_shape_is_an_error():
    blob = array_blob(np.ones(4))
    blob.shape.dim[0] = 5
    with pytest.raises(FileError, match=r"layer 'x': its shape is \(5,\), but it has 32 bytes of float64"):
        blob_array(blob, "layer 'x'")
