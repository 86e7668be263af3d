"""Caffe's files on PyTorch: prototxts, models, solver states and LMDBs, with Caffe-IBM's command lines."""

from bascule_caffe.errors import CaffeError, FileError, NetError

__version__ = "0.1.0"

__all__ = ["CaffeError", "FileError", "NetError"]
