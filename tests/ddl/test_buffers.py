"""Arrays and tensors as the library takes them."""

import ml_dtypes
import numpy as np
import pytest
import torch

from ddl.buffers import TYPES, buffer_of, empty_like
from ddl.errors import ArgumentError


@pytest.mark.parametrize("name", TYPES)
def test_numpy_and_torch_give_the_same_type_and_shape(name: str) -> None:
    array = np.zeros((2, 3), getattr(ml_dtypes, name, name) if name == "bfloat16" else name)
    tensor = torch.zeros((2, 3), dtype=getattr(torch, name))
    for one in (array, tensor):
        buffer = buffer_of(one, writable=True)
        assert (buffer.type, buffer.shape, buffer.count) == (TYPES[name], (2, 3), 6)
    assert buffer_of(array, writable=True).address == array.ctypes.data
    assert buffer_of(tensor, writable=True).address == tensor.data_ptr()


def test_a_view_into_a_tensor_begins_where_it_begins() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    assert buffer_of(tensor[1], writable=True).address == tensor.data_ptr() + 16


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 5)])
def test_any_shape_is_taken(shape: tuple[int, ...]) -> None:
    for one in (np.zeros(shape), torch.zeros(shape)):
        assert buffer_of(one, writable=True).shape == shape


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 4))[:, 1], "not contiguous"),
        (torch.zeros(4, 4).T[:2], "not contiguous"),
        (np.zeros(20, np.uint8)[1:17].view(np.float32), r"shape \(4,\), float32\) is not aligned.*array\.copy\(\)"),
        (np.zeros(3, ">f4"), "float32 in foreign byte order"),
        (np.ma.array(np.zeros(3), mask=[0, 1, 0]), r"MaskedArray, whose mask would be ignored: pass array\.filled"),
        (np.zeros(3, bool), "elements of type bool"),
        (torch.zeros(3, dtype=torch.complex64), "elements of type complex64"),
        (torch.zeros(3, requires_grad=True), "does not lend its memory.*grad"),
        (torch.tensor([1 + 2j]).conj().imag, r"without their sign; pass array\.resolve_neg\(\)"),
        (torch.tensor([1 + 2j]).conj(), "does not lend its memory.*conjugate"),
        ([1.0, 2.0], "array is a list: expected a NumPy array"),
        (np.broadcast_to(np.float32(1), (1,)), "read-only"),
    ],
)
def test_what_cannot_be_reduced_is_named(array: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        buffer_of(array, writable=True)  # type: ignore[arg-type]


def test_a_copy_of_an_unaligned_array_is_taken() -> None:
    array = np.zeros(20, np.uint8)[1:17].view(np.float32)
    assert buffer_of(array.copy(), writable=True).count == 4  # as the error says: ascontiguousarray would copy nothing


def test_a_negated_tensor_is_taken_once_its_memory_has_the_signs() -> None:
    tensor = torch.tensor([1 + 2j]).conj().imag.resolve_neg()
    assert buffer_of(tensor, writable=True).address == tensor.data_ptr()


def test_an_input_may_be_read_only() -> None:
    assert buffer_of(np.broadcast_to(np.float32(1), (1,)), writable=False).count == 1


def test_a_new_array_is_of_the_same_kind() -> None:
    assert empty_like(np.zeros(2, np.int8), (3, 4)).dtype == np.int8
    made = empty_like(torch.zeros(2, dtype=torch.bfloat16), (3, 4))
    assert (made.dtype, made.shape) == (torch.bfloat16, (3, 4))


@pytest.mark.parametrize(("device", "stream"), [(1, None), (2, 1), (13, 1)])
def test_what_a_gpu_may_still_write_is_ordered_behind_the_default_stream(device: int, stream: int | None) -> None:
    class Tensor:
        def __dlpack_device__(self) -> tuple[int, int]:
            return device, 0

        def __dlpack__(self, **options: object) -> object:
            assert options.get("stream") == stream
            return np.zeros(3).__dlpack__()

    assert buffer_of(Tensor(), writable=True).shape == (3,)  # type: ignore[arg-type]
