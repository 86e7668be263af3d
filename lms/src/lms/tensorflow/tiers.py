"""Where the bytes go: a file for a model that trains on the processor, the host's memory for one on another device."""

from __future__ import annotations

import atexit
import ctypes
import weakref
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import tensorflow as tf

from lms.build import OPERATIONS, library_path
from lms.errors import LMSError
from lms.memory.file import FileSlab
from lms.memory.spill import spill_folder

_M_MMAP_THRESHOLD = -3  # malloc.h
_LARGE = 1 << 20  # bytes: what is as large has a mapping of its own, which goes back to the system with the tensor

Edit = Callable[[bytes, int], bytes]  # the graph and the index of the mark in it -> the edited graph


class HostTier:
    """Pairs of operations on the host's device that hand a tensor on: TensorFlow itself copies between devices."""

    out_op = back_op = "LmsGate"
    before_partition = True  # the copies between devices are made then

    def __init__(self, host: str) -> None:
        self.host = host

    def device(self, own: str) -> str:
        """The host."""
        return str(tf.DeviceSpec.from_string(own).make_merged_spec(tf.DeviceSpec.from_string(self.host)).to_string())

    def __str__(self) -> str:
        return f"the memory of {self.host}"


class FileTier:
    """Pairs of LMS's own operations over one file without a name, which stays open until the process ends."""

    out_op, back_op = "LmsSwapOut", "LmsSwapIn"
    before_partition = False  # oneDNN, too, has replaced operations by then

    def __init__(self, folder: Path | None) -> None:
        self.folder = spill_folder(folder)
        load_operations()
        _open(self.folder)

    def device(self, own: str) -> str:
        """The tensor's own."""
        return own

    def __str__(self) -> str:
        return f"a file in {self.folder}"


@cache
def load_operations() -> Any:
    """LMS's operations, loaded into TensorFlow. Raises LMSError that says what to do if they are not built."""
    operations = tf.load_op_library(str(_library()))
    library = ctypes.CDLL(str(_library()))
    library.lms_tensorflow_edit_with(_edit)
    return operations


_EDITOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
_edits: dict[int, Edit] = {}  # by the index of the mark in the graph
_indices = count()


@_EDITOR  # type: ignore[untyped-decorator]
def _edit(address: int, nbytes: int, index: int, reply: int) -> None:
    """Called by TensorFlow for each graph in which a mark stands, when its optimizers are done."""
    library = ctypes.CDLL(str(_library()))
    answer = library.lms_tensorflow_answer
    answer.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_char_p)
    try:
        if index not in _edits:
            raise LMSError("the function of this graph is gone: call the tf.function that was traced")
        graph = _edits[index](ctypes.string_at(address, nbytes), index)
        answer(reply, graph, len(graph), None)
    except BaseException as error:  # no exception passes through C++
        answer(reply, None, 0, f"lms: {error}".encode())


def mark(edit: Edit, *, before_partition: bool) -> None:
    """Have the graph that is being traced edited by `edit` once TensorFlow has optimized it."""
    graph, index = tf.compat.v1.get_default_graph(), next(_indices)
    _edits[index] = edit
    weakref.finalize(graph, _edits.pop, index, None)
    with graph.name_scope(None):  # what comes before it in the optimized graph comes before every name
        load_operations().lms_mark(index=index, before_partition=before_partition, name=f"lms_mark_{index}")


@cache
def _open(folder: Path) -> FileSlab:
    slab = FileSlab(folder)
    ctypes.CDLL(str(_library())).lms_tensorflow_use(slab.fileno())
    _open_slabs.append(slab)
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)  # glibc's own choice grows, and keeps what was freed (TensorFlow 2.16)
    return slab


def give_back() -> None:
    """Have glibc give what was freed back to the system: it keeps most of what TensorFlow took to optimize a graph."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(ctypes.c_size_t(0))


_open_slabs: list[FileSlab] = []
atexit.register(_open_slabs.clear)


def _library() -> Path:
    path = library_path(tf.__version__, OPERATIONS)
    if not path.exists():
        raise LMSError(
            f"LMS swaps by operations that are not built for TensorFlow {tf.__version__}: run "
            "`python -m lms.build tensorflow` once (it needs a C++ compiler)"
        )
    return path


def usage() -> dict[str, int]:
    """What the file tier of this process has done: copies, bytes, places in use, most bytes in the file at once."""
    figures = (ctypes.c_int64 * 6)()
    ctypes.CDLL(str(_library())).lms_tensorflow_usage(figures)
    return dict(zip(("outs", "ins", "live", "swapped_out", "swapped_in", "file_peak"), figures, strict=True))


def copies(plan: int) -> tuple[int, int]:
    """How many of the copies out and of the copies back in a plan's graph have run at least once."""
    figures = (ctypes.c_int64 * 2)()
    ctypes.CDLL(str(_library())).lms_tensorflow_copies(ctypes.c_int64(plan), figures)
    return figures[0], figures[1]
