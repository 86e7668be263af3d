"""Caffe's files on PyTorch: prototxts, models, solver states and LMDBs, with Caffe-IBM's command lines.

from bascule_caffe import Net, NetParameter, parse_text

net = Net(parse_text("deploy.prototxt", NetParameter), "TEST")
net.load_caffemodel("net.caffemodel")
scores = net(data=images)["prob"]
"""

from bascule_caffe.data import Feed, Share
from bascule_caffe.errors import CaffeError, FileError, NetError
from bascule_caffe.layer import register_layer
from bascule_caffe.messages import NetParameter, SolverParameter, foreign, parse_text
from bascule_caffe.net import Learnable, Net
from bascule_caffe.solver import Solver

__version__ = "0.1.0"

__all__ = [
    "CaffeError",
    "Feed",
    "FileError",
    "Learnable",
    "Net",
    "NetError",
    "NetParameter",
    "Share",
    "Solver",
    "SolverParameter",
    "foreign",
    "parse_text",
    "register_layer",
]
