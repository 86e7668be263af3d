"""Saving tensors that are away: while a save runs, its system calls read them from the pager's file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import import_module
from typing import Any

import torch

Reading = Callable[[], AbstractContextManager[None]]  # in such a context, system calls may read what is away


def let_saves_read(reading: Reading) -> None:
    """Let `torch.save`, `torch.jit.save` and safetensors' `save_file` save what is away, also after a session.

    A script may have imported them before, so this replaces the functions that they call.
    """
    serialization: Any = torch.serialization
    if hasattr(serialization._open_zipfile_writer, "reads"):
        return
    # One of these opens the file of `torch.save`.
    zipped, plain = serialization._open_zipfile_writer, serialization._open_file_like
    serialization._open_zipfile_writer = _opens(zipped, reading)

    @functools.wraps(plain)
    def open_file_like(target: Any, mode: str) -> Any:
        return plain(target, mode) if "r" in mode else _opens(plain, reading)(target, mode)

    serialization._open_file_like = open_file_like
    jit: Any = torch.jit
    if hasattr(jit.RecursiveScriptModule, "save"):  # not with PYTORCH_JIT=0
        jit.RecursiveScriptModule.save = _calls(jit.RecursiveScriptModule.save, reading)
    with suppress(ImportError, AttributeError):  # other versions may have no such function
        safetensors: Any = import_module("safetensors.torch")
        safetensors.serialize_file = _calls(safetensors.serialize_file, reading)


def _opens(plain: Callable[..., AbstractContextManager[Any]], reading: Reading) -> Callable[..., Any]:
    @functools.wraps(plain)
    @contextmanager
    def opening(*args: Any) -> Generator[Any, None, None]:
        with reading(), plain(*args) as opened:
            yield opened

    opening.reads = True  # type: ignore[attr-defined]
    return opening


def _calls(plain: Callable[..., Any], reading: Reading) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        with reading():
            return plain(*args, **kwargs)

    return call
