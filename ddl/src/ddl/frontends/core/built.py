"""Horovod's questions about what was built in, with the answers that are the same for every framework."""

from __future__ import annotations

from ddl import library


def mpi_enabled() -> bool:
    """True, so that scripts that require MPI go on. In a job without mpirun, TCP carries the messages."""
    return True


def mpi_built() -> bool:
    """Whether libddl has its plugin for MPI."""
    return library.beside(library.PLUGIN) is not None


def gloo_enabled() -> bool:
    """Whether gloo carries the messages: never."""
    return False


def gloo_built() -> bool:
    """Whether there is gloo: no."""
    return False


def nccl_built() -> int:
    """The version of NCCL at build time: 0, because libddl finds NCCL at run time."""
    return 0


def ddl_built() -> bool:
    """Whether there is DDL (a backend that Horovod had): yes."""
    return True


def ccl_built() -> bool:
    """Whether there is oneCCL: no."""
    return False


def rocm_built() -> bool:
    """Whether tensors on AMD's GPUs can be reduced: no."""
    return False


def mpi_threads_supported() -> bool:
    """Whether other threads may use MPI too: no, libddl's own thread does all."""
    return False
