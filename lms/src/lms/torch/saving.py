"""Saving tensors that may be away: the system calls of these functions read them where the pager has put them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import import_module
from typing import Any

import torch

Reading = Callable[[], AbstractContextManager[None]]  # in such a context, system calls may read what is away


def let_saves_read(reading: Reading) -> None:
    """Have `torch.save`, `torch.jit.save` and safetensors' `save_file` do so from now on: after a session, too.

    A script may have imported them before, so what they call is replaced.
    """
    serialization: Any = torch.serialization
    if hasattr(serialization._open_zipfile_writer, "reads"):
        return
    for name in ("_open_zipfile_writer", "_open_file_like"):  # one of them opens the file of `torch.save`
        setattr(serialization, name, _opens(getattr(serialization, name), reading))
    jit: Any = torch.jit
    jit.RecursiveScriptModule.save = _calls(jit.RecursiveScriptModule.save, reading)
    with suppress(ImportError):
        safetensors: Any = import_module("safetensors.torch")
        safetensors.serialize_file = _calls(safetensors.serialize_file, reading)


def _opens(plain: Callable[..., AbstractContextManager[Any]], reading: Reading) -> Callable[..., Any]:
    @functools.wraps(plain)
    @contextmanager
    def opening(*args: Any, **kwargs: Any) -> Generator[Any, None, None]:
        with reading(), plain(*args, **kwargs) as opened:
            yield opened

    opening.reads = True  # type: ignore[attr-defined]
    return opening


def _calls(plain: Callable[..., Any], reading: Reading) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        with reading():
            return plain(*args, **kwargs)

    return call
