"""Models and solver states on the disk, and what happens to damaged ones."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from bascule_caffe.errors import FileError, NetError
from bascule_caffe.messages import (
    NetParameter,
    SolverState,
    array_blob,
    parse_string,
    write_binary,
)
from bascule_caffe.net import Net
from bascule_caffe.optimizers import SOLVERS, CaffeOptimizer
from bascule_caffe.snapshot import Progress, load_model, load_state, save_model, save_state

NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 6 } } }
layer { name: "a/ip" type: "InnerProduct" bottom: "data" top: "a" inner_product_param { num_output: %d
  weight_filler { type: "gaussian" } } }
layer { name: "b" type: "InnerProduct" bottom: "a" top: "b" inner_product_param { num_output: 2
  weight_filler { type: "gaussian" } } }
"""


def net_of(width: int = 4) -> Net:
    return Net(parse_string(NET % width, NetParameter, "net.prototxt"), "TRAIN")


def optimizer_of(net: Net, kind: str = "Adam") -> CaffeOptimizer:
    """After a step, so that no history is zero."""
    optimizer = SOLVERS[kind]([entry.parameter for entry in net.learnable], lr=0.1, momentum=0.9)
    net(data=torch.ones(2, 6))["b"].sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("ending", ["", ".h5"])
def test_a_model_and_a_state_come_back(tmp_path: Path, ending: str) -> None:
    net, other = net_of(), net_of()
    optimizer = optimizer_of(net)
    model, state = (str(tmp_path / f"x.{what}{ending}") for what in ("caffemodel", "solverstate"))
    save_model(model, net)
    save_state(state, optimizer, Progress(7, 2, model))
    assert load_model(model, other) == ["a/ip", "b"]
    for one, two in zip(net.learnable, other.learnable, strict=True):
        assert one.parameter.equal(two.parameter)
    again = SOLVERS["Adam"]([entry.parameter for entry in other.learnable])
    assert load_state(state, again) == Progress(7, 2, model)
    assert again.iteration == 7
    for one, two in zip(optimizer.histories(), again.histories(), strict=True):
        assert one.any()
        assert one.equal(two)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([Path(model).name, Path(state).name])


def test_histories_of_old_files_have_four_dimensions(tmp_path: Path) -> None:
    net = net_of()
    optimizer = optimizer_of(net, "SGD")
    state: Any = SolverState(iter=3)
    for history in optimizer.histories():
        shape = (1,) * (4 - history.ndim) + tuple(history.shape)
        state.history.append(array_blob(history.numpy().reshape(shape) + 1))
    write_binary(tmp_path / "x.solverstate", state)
    before = [history.clone() for history in optimizer.histories()]
    load_state(str(tmp_path / "x.solverstate"), optimizer)
    for history, old in zip(optimizer.histories(), before, strict=True):
        assert history.equal(old + 1)


@pytest.mark.parametrize("ending", ["", ".h5"])
@pytest.mark.parametrize("what", ["caffemodel", "solverstate"])
def test_a_truncated_file_is_told_and_changes_nothing(tmp_path: Path, what: str, ending: str) -> None:
    net = net_of()
    optimizer = optimizer_of(net)
    path = tmp_path / f"x.{what}{ending}"
    save_model(str(path), net) if what == "caffemodel" else save_state(str(path), optimizer, Progress(1, 0))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    before = [tensor.clone() for tensor in (*net.state_dict().values(), *optimizer.histories())]
    with pytest.raises(FileError, match=f"x.{what}"):
        load_model(str(path), net) if what == "caffemodel" else load_state(str(path), optimizer)
    after = [*net.state_dict().values(), *optimizer.histories()]
    assert all(one.equal(two) for one, two in zip(before, after, strict=True))


@pytest.mark.parametrize("ending", ["", ".h5"])
def test_another_nets_files_are_refused(tmp_path: Path, ending: str) -> None:
    small, large = net_of(4), net_of(5)
    model, state = (str(tmp_path / f"x.{what}{ending}") for what in ("caffemodel", "solverstate"))
    save_model(model, small)
    save_state(state, optimizer_of(small), Progress(1, 0))
    with pytest.raises((NetError, FileError), match="a/ip"):
        load_model(model, large)
    with pytest.raises(FileError, match=r"another net or solver: .* number 0 is \(4, 6\), not \(5, 6\)"):
        load_state(state, optimizer_of(large))
    with pytest.raises(FileError, match="it has 8 histories, and SGD has 4 for this net"):
        load_state(state, optimizer_of(small, "SGD"))


def test_a_snapshot_that_cannot_be_written_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = net_of()
    for ending in ("", ".h5"):
        path = tmp_path / f"x.caffemodel{ending}"
        save_model(str(path), net)
        good = path.read_bytes()

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("os.fsync", full)
            with pytest.raises(FileError, match=r"cannot be written: .*No space left"):
                save_model(str(path), net_of())
        assert path.read_bytes() == good
    assert len(list(tmp_path.iterdir())) == 2


def test_a_disk_that_is_full_halfway_leaves_the_last_model(tmp_path: Path, files_of_at_most: Any) -> None:
    """HDF5 would crash the process."""
    wide, path = net_of(20_000), tmp_path / "x.h5"
    save_model(str(path), net_of())
    good = path.read_bytes()
    wanted = r"x.h5: cannot be written: .*File too large"
    with files_of_at_most(100_000), pytest.raises(FileError, match=wanted):
        save_model(str(path), wide)
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]


def test_an_hdf5_model_is_not_built_in_memory(tmp_path: Path) -> None:
    net, path = net_of(100_000), tmp_path / "x.h5"
    tracemalloc.start()
    try:
        save_model(str(path), net)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 2


def test_an_hdf5_model_has_layers_whose_names_begin_with_anothers(tmp_path: Path) -> None:
    text = (NET % 4).replace('"a/ip"', '"conv1"').replace('name: "b"', 'name: "conv1/bn"')
    net, other = (Net(parse_string(text, NetParameter), "TRAIN") for _ in range(2))
    save_model(str(tmp_path / "x.h5"), net)
    assert load_model(str(tmp_path / "x.h5"), other) == ["conv1", "conv1/bn"]
    for one, two in zip(net.learnable, other.learnable, strict=True):
        assert one.parameter.equal(two.parameter)


def test_an_hdf5_model_has_a_shared_blob_in_its_first_layer_only_as_caffe_writes_it(tmp_path: Path) -> None:
    """The weights are shared, as 4x6 and as 6x4, and the biases are not."""
    text = (NET % 4).replace('top: "a"', 'top: "a" param { name: "w" }').replace("num_output: 2", "num_output: 6")
    text = text.replace('top: "b"', 'top: "b" param { name: "w" share_mode: PERMISSIVE }')
    net, other = (Net(parse_string(text, NetParameter), "TRAIN") for _ in range(2))
    for entry in net.learnable:
        torch.nn.init.normal_(entry.parameter)
    path = str(tmp_path / "x.h5")
    save_model(path, net)
    with h5py.File(path) as file:
        assert {name: list(file[f"data/{name}"]) for name in ("a/ip", "b")} == {"a/ip": ["0", "1"], "b": ["1"]}
    assert load_model(path, other) == ["a/ip", "b"]
    for one, two in zip(net.learnable, other.learnable, strict=True):
        assert one.parameter.equal(two.parameter)
    apart = Net(parse_string((NET % 4).replace("num_output: 2", "num_output: 6"), NetParameter), "TRAIN")
    with pytest.raises(NetError, match="layer 'b' has 1 blobs, and 2 in net"):
        load_model(path, apart)


def test_what_hdf5_cannot_hold_leaves_the_last_model(tmp_path: Path, files_of_at_most: Any) -> None:
    path = tmp_path / "x.h5"
    save_model(str(path), net_of())
    good = path.read_bytes()
    text = (NET % 4).replace('name: "b"', 'name: "a/ip"')
    with pytest.raises(FileError, match=r"x.h5: cannot be written as HDF5"):
        save_model(str(path), Net(parse_string(text, NetParameter), "TRAIN"))
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]
