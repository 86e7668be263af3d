"""Views over bytes that leave and come back, and what may move at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lms.torch.movable import movable, nbytes_of
from lms.torch.records import Handle, LiveRecord, View

CPU = torch.device("cpu")


def bytes_of(tensor: Tensor) -> Tensor:
    """A copy of the tensor's whole storage, 1-D uint8."""
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return flat.clone()


BASE = torch.arange(60, dtype=torch.float32)


@pytest.mark.parametrize(
    "tensor",
    [
        BASE,
        BASE[7:19],
        BASE.view(6, 10).t()[2:, ::3],
        BASE[5].expand(3, 4),
        BASE.as_strided((4, 3), (7, 2), 11),
        BASE[:0],
        BASE[3],
        BASE.view(torch.int32)[1:],
        BASE.view(torch.complex64)[3:9],
        BASE.bfloat16()[4:],
        BASE > 20,
        BASE.view(1, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}-{tensor.storage_offset()}",
)
def test_a_view_lies_over_other_bytes_as_it_lay_over_its_own(tensor: Tensor) -> None:
    view = View(tensor)
    flat = bytes_of(tensor)
    view.vacate()
    assert view.alias.untyped_storage().nbytes() == 0
    view.fill(flat)
    assert torch.equal(view.alias, tensor)
    assert (view.alias.size(), view.alias.stride()) == (tensor.size(), tensor.stride())
    assert view.alias.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_bytes_may_begin_anywhere_in_what_came_back() -> None:
    tensor = BASE.view(6, 10)[1:, 2:]
    view = View(tensor)
    flat = torch.cat([torch.zeros(64, dtype=torch.uint8), bytes_of(tensor)])[64:]
    view.vacate()
    view.fill(flat)
    assert torch.equal(view.alias, tensor)


def test_a_view_that_is_vacated_twice_keeps_its_geometry() -> None:
    """Its record left, came back for another view, and left again."""
    tensor = torch.arange(12.0).view(3, 4).t()
    expected, flat = tensor.clone(), bytes_of(tensor)
    view = View(tensor)
    for _ in range(2):
        view.vacate()
    view.fill(flat)
    assert torch.equal(view.alias, expected)
    assert view.alias.stride() == tensor.stride()


def test_a_vacated_view_still_sees_changes_in_place() -> None:
    tensor = torch.zeros(4, 5)
    view = View(tensor)
    assert not view.changed
    view.vacate()
    assert not view.changed
    view.check()
    tensor[1].add_(1)  # through a view of it
    assert view.changed
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation: \[torch.FloatTensor \[4, 5\]\] is at version 1"
    ):
        view.check()


def test_filling_is_no_change_and_a_change_afterwards_is_one() -> None:
    tensor = torch.ones(5)
    view = View(tensor)
    view.vacate()
    view.fill(bytes_of(tensor))
    view.check()
    view.alias.detach().mul_(2)  # as a backward that writes into what it was handed
    assert view.changed


def test_what_was_handed_out_keeps_its_bytes_when_the_view_is_vacated() -> None:
    tensor = torch.arange(5.0)
    view = View(tensor)
    handed = view.alias.detach()
    view.vacate()
    assert torch.equal(handed, torch.arange(5.0))


def test_a_tensor_that_stays_sees_changes_in_place() -> None:
    tensor = torch.ones(3)
    kept = View(tensor)
    kept.check()
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.check()


def test_a_record_is_the_whole_storage() -> None:
    tensor = BASE.clone()[10:12]
    storage = tensor.untyped_storage()
    record = LiveRecord(0, (storage._cdata, 0), storage.nbytes())
    record.views.append(View(tensor))
    assert record.nbytes == 240
    assert torch.equal(record.source(), bytes_of(tensor))
    assert record.source().data_ptr() == storage.data_ptr(), "the bytes themselves, not a copy"


def test_the_end_of_a_handle_is_noted() -> None:
    told = []
    tensor = torch.ones(3)
    storage = tensor.untyped_storage()
    record, view = LiveRecord(0, (0, 0), storage.nbytes()), View(tensor)
    handle = Handle(record, view, lambda *end: told.append(end))
    assert told == []
    del handle
    assert told == [(record, view)]


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensor", "moves"),
    [
        (torch.ones(3), True),
        (torch.nn.Parameter(torch.ones(3)), True),
        (torch.ones(3, dtype=torch.complex64), True),
        (torch.ones(3, dtype=torch.bool), True),
        (torch.ones(3, dtype=torch.complex64).conj(), False),
        (torch.ones(3, dtype=torch.complex64).conj().imag, False),
        (torch._efficientzerotensor(3), False),
        (torch.ones(3).as_subclass(Subclass), False),
        (torch.eye(3).to_sparse(), False),
        (lambda: torch.eye(3).to_sparse_csr(), False),
        (torch.ones(3, device="meta"), False),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), False),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), False),
    ],
    ids=[
        "plain", "parameter", "complex", "bool", "conjugated", "negated", "zeros without memory", "subclass", "sparse",
        "csr", "meta", "nested", "quantised",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_only_plain_bytes_move(tensor: Tensor | Callable[[], Tensor], moves: bool) -> None:
    assert movable(tensor if isinstance(tensor, Tensor) else tensor(), CPU) is moves


def test_what_a_function_transform_wraps_does_not_move() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(movable(x, CPU))
        return x * 2

    torch.vmap(look)(torch.ones(3, 4))
    assert seen == [False]


def test_fake_tensors_do_not_move() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert not movable(torch.ones(3), CPU)


class Pair(torch.Tensor):
    """Two tensors that pretend to be one, and a name that is none."""

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor) -> Pair:
        pair = torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)
        pair.first, pair.second, pair.name_ = first, second, "pair"
        return pair

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second", "name_"], None

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> None:
        raise NotImplementedError


class Silent(torch.Tensor):
    """Says nothing about itself."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        raise RuntimeError("mine")


@pytest.mark.parametrize(
    ("tensor", "nbytes"),
    [
        (torch.ones(3), 12),
        (torch.ones(3, 4)[:, ::2], 24),
        (torch.nn.Parameter(torch.ones(3)), 12),
        (torch.eye(3).to_sparse(), 3 * 4 + 2 * 3 * 8),
        (lambda: torch.eye(3).to_sparse_csr(), 3 * 4 + 3 * 8 + 4 * 8),
        (lambda: torch.eye(3).to_sparse_csc(), 3 * 4 + 3 * 8 + 4 * 8),
        (torch.ones(3).as_subclass(Subclass), 12),
        (lambda: Pair(torch.ones(3), torch.ones(3)), 24),
        (lambda: Pair(torch.eye(3).to_sparse(), torch.ones(3)), 60 + 12),
        (torch.ones(3).as_subclass(Silent), 0),
        (torch.ones(3, device="meta"), 0),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), 5 * 4 + 3 * 8),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), 3),
    ],
    ids=[
        "plain", "view", "parameter", "sparse", "csr", "csc", "subclass", "wrapper", "wrapper of sparse", "silent",
        "meta", "jagged", "quantised",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_bytes_of_a_tensor_of_any_kind(tensor: Tensor | Callable[[], Tensor], nbytes: int) -> None:
    assert nbytes_of(tensor if isinstance(tensor, Tensor) else tensor()) == nbytes
