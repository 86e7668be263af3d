"""Saved tensors as LMS keeps them: a record for each (storage, version), a view for each tensor saved of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from lms.core.items import Item, State
from lms.memory.slots import Slot
from lms.runtime.recorder import Recorder

use_count: Callable[[int], int] = torch._C._storage_Use_Count  # of a storage. PyTorch has no public name for this.


class View:
    """One saved tensor: its geometry, and an alias without history that shares its version counter.

    Autograd keeps a view alone of a tensor that stays. The views of a record share its storage while that is resident.
    `vacate` takes the storage away and keeps the counter, so that a change in place is noticed however long the bytes
    have been away.
    """

    __slots__ = ("alias", "geometry", "version")

    def __init__(self, tensor: torch.Tensor, version: int | None = None) -> None:
        self.alias = tensor.detach()
        self.version = tensor._version if version is None else version
        self.geometry: tuple[torch.dtype, int, torch.Size, tuple[int, ...]] | None = None  # once the storage is away

    def vacate(self) -> None:
        """Let go of the storage."""
        alias = self.alias
        if self.geometry is None:  # else it is away already, or has come back with the same one
            self.geometry = alias.dtype, int(alias.storage_offset()), alias.size(), alias.stride()
        alias.data = torch.empty(0, dtype=alias.dtype, device=alias.device)

    def fill(self, flat: torch.Tensor) -> None:
        """Lie over the bytes of `flat` (1-D uint8) from now on; the version counter stays."""
        assert self.geometry is not None
        dtype, offset, size, stride = self.geometry
        start = flat.storage_offset() // dtype.itemsize + offset
        tensor = torch.empty(0, dtype=dtype, device=flat.device)
        self.alias.data = tensor.set_(flat.untyped_storage(), start, size, stride)

    @property
    def changed(self) -> bool:
        """Whether the tensor was changed in place since it was saved, so that its use will raise."""
        return self.alias._version != self.version

    def check(self) -> None:
        """Raise as plain autograd does when the tensor was changed in place since it was saved."""
        size = self.alias.size() if self.geometry is None else self.geometry[2]
        check_version(self.alias, self.version, size)

    def wrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """The saved tensor, given the plain tensor that holds its bytes."""
        return tensor


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the tensor's storage, 1-D uint8."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def check_version(alias: torch.Tensor, version: int, size: torch.Size) -> None:
    """Raise what plain autograd raises when a saved tensor's version is another than when it was saved.

    Autograd leaves the check to the code that installs saved-tensor hooks.
    """
    if alias._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{alias.type()} {list(size)}] is at version {alias._version}; expected version {version} instead. "
            "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True)."
        )


class Origin(weakref.ref[torch.UntypedStorage]):
    """Dies with the storage that the forward made. One for each record, because weak references cost time."""

    __slots__ = ("record", "recorder")

    record: LiveRecord
    recorder: Recorder


class LiveRecord(Item):
    """A record while autograd holds at least one handle on it."""

    __slots__ = ("flat", "handed", "key", "origin", "root", "slot", "views")

    def __init__(self, index: int, key: tuple[int, ...], nbytes: int) -> None:
        super().__init__(index, nbytes)
        self.key = key
        self.origin: Origin | None = None
        self.root: weakref.ref[torch.Tensor] | None = None  # the DTensor whose version the key has
        self.views: list[View] = []
        self.slot: Slot | None = None  # in the tier below, once a copy out has started
        self.flat: torch.Tensor | None = None  # its bytes in a storage that LMS made
        self.handed: weakref.ref[torch.Tensor] | None = None  # the tensor that its last use was given

    def holds(self, storage: torch.UntypedStorage, root: torch.Tensor | None) -> bool:
        """Whether the record is of this very storage, saved through this very DTensor if it was through one."""
        known = self.root() if self.root is not None else None
        return self.origin is not None and self.origin() is storage and known is root

    @property
    def let_go(self) -> bool:
        """Whether LMS has let go of the storage that the forward made."""
        return self.flat is not None or self.state is State.AWAY

    @property
    def kept_by_others(self) -> bool:
        """Whether other code than LMS and autograd has the storage that the forward made."""
        storage = self.origin() if self.origin is not None else None
        if storage is None:
            return False
        # The views' aliases and the object `storage` count too.
        return use_count(storage._cdata) > len(self.views) + 1

    def storage(self) -> torch.UntypedStorage | None:
        """The storage that has the record's bytes on the device; None if there is none."""
        if self.flat is not None:
            return self.flat.untyped_storage()
        return self.origin() if self.origin is not None else None

    def source(self) -> torch.Tensor:
        """The storage's bytes, 1-D uint8."""
        return self.flat if self.flat is not None else flat_bytes(self.views[0].alias)


class Handle:
    """Autograd keeps this instead of a tensor that may move. When it dies, the view is not needed any more."""

    __slots__ = ("_ended", "record", "view")

    def __init__(self, record: LiveRecord, view: View, ended: Callable[[LiveRecord, View], None]) -> None:
        self.record = record
        self.view = view
        self._ended = ended

    def __del__(self) -> None:
        self._ended(self.record, self.view)
