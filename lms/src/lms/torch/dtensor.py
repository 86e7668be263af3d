"""DTensors: this rank's part of one is a plain tensor, and that can move."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

import torch

from lms.torch.records import View, check_version

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def local_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of a DTensor; None if `tensor` is another kind of tensor.

    It is no plain tensor while a collective that makes it may still be under way (AsyncCollectiveTensor).
    """
    # A process that did not import DTensor has none, and importing it takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or type(tensor) is not module.DTensor:
        return None
    return cast("DTensor", tensor)._local_tensor


class DTensorView(View):
    """A saved DTensor. Its local tensor is moved; the DTensor is made again around what came back.

    An in-place operation on a DTensor counts in its own version, one on the result of `to_local()` in the local
    tensor's, so both are compared.
    """

    __slots__ = ("whole", "whole_version")

    def __init__(self, tensor: torch.Tensor, local: torch.Tensor) -> None:
        super().__init__(local)
        self.whole = cast("DTensor", tensor.detach())  # shares the version counter
        self.whole._local_tensor = local.new_empty(0)  # and no storage: that is the alias's
        self.whole_version = tensor._version

    @property
    def changed(self) -> bool:
        """Whether the DTensor or its local tensor was changed in place since it was saved."""
        return self.whole._version != self.whole_version or super().changed

    def check(self) -> None:
        """Raise as plain autograd does if it was changed in place since it was saved."""
        check_version(self.whole, self.whole_version, self.whole.size())
        super().check()

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """The DTensor over `local`, with the layout of the saved one."""
        return type(self.whole)(local, self.whole._spec, requires_grad=False)
