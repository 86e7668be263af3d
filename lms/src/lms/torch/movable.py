"""Which saved tensors can move, and why the others stay."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from lms.torch.dtensor import local_part
from lms.torch.records import View
from lms.warn import warn_script

REASONS = ("parameters", "small", "owned", "types", "device", "stream", "capture")  # why saved bytes stay: lms.stats
_WARNINGS = {
    "stream": "a tensor was saved on another CUDA stream than the one on which its pass began: LMS swaps what that one "
    "saves, and the rest stays on the device",
    "capture": "a CUDA graph is captured: what is saved meanwhile stays on the device, because a replay of the graph "
    "uses the same addresses and calls no hooks",
}

# A tensor of torch.func (vmap, grad) wraps another and has no memory of its own. PyTorch has no public name for this.
_is_wrapper: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


class Movable:
    """Tells which storages can move, and counts the others: those elsewhere, below `min_size` bytes, and parameters."""

    def __init__(self, device: torch.device, min_size: int) -> None:
        self.device = device
        self.min_size = min_size
        self.stay: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # parameters and buffers, by address
        self.stayed = dict.fromkeys(REASONS, 0)  # bytes that were saved and stay, each time that they are saved
        self._warned: set[str] = set()

    def kept(self, tensor: torch.Tensor, reason: str) -> View:
        """The object that autograd is to keep of a tensor that stays. Some reasons are worth a warning, once."""
        self.stayed[reason] += nbytes_of(tensor)
        if reason in _WARNINGS and reason not in self._warned:
            self._warned.add(reason)
            warn_script(_WARNINGS[reason])
        return View(tensor)

    def never(self, tensor: torch.Tensor) -> None:
        """Never move the storage of this parameter or buffer."""
        local = tensor if is_plain(tensor) else local_part(tensor)
        if local is not None and movable(local, local.device):
            self._never(local.untyped_storage())

    def _never(self, storage: torch.UntypedStorage) -> None:
        key, forget = storage._cdata, self.stay
        self.stay[key] = weakref.ref(storage, lambda _: forget.pop(key, None))

    def storage(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.UntypedStorage] | str:
        """The plain tensor that holds the bytes of `tensor`, and its storage; or the reason why it stays."""
        local = tensor if is_plain(tensor) else local_part(tensor)
        if local is None:
            return "types"
        if not movable(local, self.device):
            return "types" if local.device == self.device else "device"
        try:
            storage = local.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return "types"  # a wrapper without memory of its own
        if storage.nbytes() < self.min_size:
            return "small"
        return "parameters" if self._must_stay(tensor, storage) else (local, storage)

    def _must_stay(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        known = self.stay.get(storage._cdata)
        if known is not None and known() is storage:
            return True
        base = tensor._base if tensor._base is not None else tensor
        if base.is_leaf and (base.requires_grad or isinstance(base, torch.nn.Parameter)):  # or a frozen one
            self._never(storage)
            return True
        return False


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is of no subclass."""
    kind = type(tensor)
    return kind is torch.Tensor or kind is torch.nn.Parameter


def nbytes_of(tensor: torch.Tensor) -> int:
    """The bytes that a tensor of any kind holds; 0 if it does not tell."""
    if is_plain(tensor) and tensor.layout is torch.strided:
        return 0 if tensor.is_meta else tensor.nbytes
    try:
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.layout is torch.sparse_coo:
                parts = [tensor._indices(), tensor._values()]
            elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
                parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
            elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
                parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
            elif hasattr(tensor, "__tensor_flatten__"):
                parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            else:
                return int(tensor.numel()) * tensor.element_size()
            return sum(nbytes_of(part) for part in parts if isinstance(part, torch.Tensor))
    except Exception:  # a subclass may raise anything: a figure must not end a training
        return 0


def movable(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether the tensor is plain bytes on `device`.

    Subclasses, sparse, nested, quantised, meta and fake tensors are not, nor lazily conjugated or negated views. Zeros
    of forward-mode differentiation have no memory, so they are not movable either.
    """
    return (
        is_plain(tensor)
        and tensor.device == device
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
        and not _is_wrapper(tensor)
    )
