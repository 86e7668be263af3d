"""Locking pages for a GPU, with a driver that is made up."""

from pathlib import Path

import pytest

import lms.torch.cuda.pinning as module
from lms.errors import SpillError
from lms.torch.cuda.pinning import cuda_register

MB = 1 << 20


class Driver:
    """What `torch.cuda.cudart()` gives, without a GPU."""

    def __init__(self, code: int) -> None:
        self.code = code

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        return self.code

    def cudaGetErrorString(self, code: int) -> str:
        return {2: "out of memory"}[code]


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The libraries that were asked for CUDA's last error."""
    asked: list[str] = []

    class Library:
        def __init__(self, path: str) -> None:
            self.path = path

        def cudaGetLastError(self) -> int:
            asked.append(self.path)
            return 2

    monkeypatch.setattr(module, "_mapped_files", lambda prefix: [f"/somewhere/{prefix}.so.13"])
    monkeypatch.setattr(module.ctypes, "CDLL", Library)
    return asked


def test_a_lock_that_the_driver_refuses_says_so_and_leaves_no_error_for_the_next_launch(
    forgotten: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.cudart", lambda: Driver(2))
    with pytest.raises(SpillError, match=r"locking 1.05 MB .*cudaHostRegister: error 2, out of memory"):
        cuda_register(0, MB)
    assert forgotten == ["/somewhere/libcudart.so.13"]


def test_after_a_lock_that_worked_nothing_is_cleared(forgotten: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.cudart", lambda: Driver(0))
    cuda_register(0, MB)
    assert forgotten == []


def test_the_libraries_of_a_process_are_found_by_name_each_once(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f10 r-xp 00000000 08:01 11 /site packages/libcudart-1a2b.so.13.0\n"
        "7f10-7f20 rw-p 00001000 08:01 11 /site packages/libcudart-1a2b.so.13.0\n"
        "7f20-7f30 r-xp 00000000 08:01 12 /usr/lib/libcuda.so.1\n"
        "7f30-7f40 rw-p 00000000 00:00 0 [heap]\n"
        "7f40-7f50 rw-p 00000000 00:00 0 \n"
    )
    assert module._mapped_files("libcudart", maps) == ["/site packages/libcudart-1a2b.so.13.0"]
    assert module._mapped_files("libc"), "the process's own"
