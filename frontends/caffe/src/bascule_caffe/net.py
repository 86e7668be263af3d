"""A net: the layers of a NetParameter, in order, as an nn.Module."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from google.protobuf.message import Message
from torch import Tensor, nn

from bascule_caffe import elementwise, losses, normalization, shaping, spatial  # noqa: F401 - they register their layers
from bascule_caffe.elementwise import Eltwise, ReLU
from bascule_caffe.errors import NetError, NoLayerError
from bascule_caffe.layer import Layer, Shape, UserLayer, build, dims, place_of, require
from bascule_caffe.messages import (
    LayerParameter,
    Model,
    NetParameter,
    ParamSpec,
    array_blob,
    blob_array,
    clear_private,
    read_binary,
)
from bascule_caffe.normalization import BatchNorm, Scale
from bascule_caffe.shaping import InnerProduct
from bascule_caffe.spatial import Convolution
from bascule_caffe.upgrade import upgraded


@dataclass(frozen=True)
class Learnable:
    """A blob of a net: once, also if several layers share it.

    Attributes:
        parameter: the blob.
        lr_mult: what the learning rate is multiplied by; 0 for statistics.
        decay_mult: what the weight decay is multiplied by.
        owner: the first layer that has it, and the index of the blob there, such as "conv1[0]".
    """

    parameter: nn.Parameter
    lr_mult: float
    decay_mult: float
    owner: str


class Net(nn.Module):
    """A net of Caffe's.

    Args:
        parameter: the NetParameter, in today's form or an older one.
        phase: "TRAIN" or "TEST".
        level: for rules with min_level and max_level.
        stages: for rules with stage and not_stage; those of the net's own state are added.
        inputs: shapes by blob. A data layer all of whose tops are among them becomes an Input, and an Input has them.
        data: is handed to the factories of data layers.
        generator: gives the fillers their numbers; None is PyTorch's default.

    Attributes:
        layers: the layers of this phase in their order, each with name, kind, bottoms, tops, parameter and blobs.
        learnable: the blobs of all layers, in Caffe's order: a solver state has its history in it.
        shapes: a shape for each blob.
        outputs: the blobs that no layer takes, in the order of the alphabet, as Caffe has them.
        loss_weights: what each top that counts into the loss is multiplied by.
        loss: the weighted loss of the last forward: a tensor without axes.

    Raises:
        NetError: the net cannot be built; says the file, the line, the layer, its type and what is wrong.
    """

    def __init__(
        self,
        parameter: Message,
        phase: str = "TEST",
        level: int = 0,
        stages: Sequence[str] = (),
        *,
        inputs: Mapping[str, Sequence[int]] | None = None,
        data: object = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if phase not in ("TRAIN", "TEST"):
            raise ValueError(f"phase is {phase!r}; allowed are 'TRAIN' and 'TEST'")
        self.name, self.phase = str(parameter.name), phase
        self.register_buffer("anchor", torch.zeros(()), persistent=False)  # has the net's device and type
        self.anchor: Tensor
        self.layers: list[Layer] = []
        self.by_name = nn.ModuleDict()
        self.shapes: dict[str, Shape] = {}
        self.loss_weights: dict[str, float] = {}
        self.loss = self.anchor
        self._producers: dict[str, str] = {}  # the layer that made each blob last
        self._taken: set[str] = set()
        self._hidden: set[str] = set()  # tops that losses without a top were given
        self._weights: list[list[float]] = []  # for each layer, each top's weight in the loss
        net = upgraded(parameter)
        state = (phase, level or net.state.level, {*net.state.stage, *stages})
        for layer_parameter in net.layer:
            layer_parameter.location = layer_parameter.location or self.name
            with _placed(layer_parameter):
                if _included(layer_parameter, *state):
                    self._add(layer_parameter, inputs or {}, data)
        self.outputs = sorted(set(self._producers) - self._taken - self._hidden)
        self.learnable = self._fill(generator)
        self._fold_scales()
        self._overwrite()
        self._last_use = self._find_last_uses()

    def _add(self, parameter: Message, inputs: Mapping[str, Sequence[int]], data: object) -> None:
        phase = ("TRAIN", "TEST")[parameter.phase] if parameter.HasField("phase") else self.phase
        if inputs and not parameter.bottom and parameter.top and all(top in inputs for top in parameter.top):
            parameter = LayerParameter(name=parameter.name, type="Input", top=parameter.top)
            for top in parameter.top:
                parameter.input_param.shape.add(dim=inputs[top])
        for bottom in parameter.bottom:
            there = bottom in self.shapes
            require(there, f"no layer before it makes its bottom '{bottom}'; there are {_some(self.shapes)}")
        shapes = [self.shapes[bottom] for bottom in parameter.bottom]
        try:
            layer = build(parameter, shapes, phase, data)
            if layer.is_loss and not layer.tops:
                layer.tops.append(f"{layer.name} (automatic)")
                self._hidden.add(layer.tops[0])
            tops = layer.infer(shapes)
        except (ValueError, ArithmeticError, RuntimeError, IndexError) as error:
            made = [f"'{b}' {dims(self.shapes[b])} of layer '{self._producers[b]}'" for b in parameter.bottom]
            over = f" Its bottoms: {', '.join(made)}." if made else ""
            raise NetError(f"{str(error).rstrip('.')}.{over}") from error
        names = ", ".join(layer.tops)
        require(len(tops) == len(layer.tops), f"it makes {len(tops)} tops, and {len(layer.tops)} are named: {names}")
        for index, (top, shape) in enumerate(zip(layer.tops, tops, strict=True)):
            new = top not in self._producers or layer.bottoms[index : index + 1] == [top]  # or it works in place
            require(new, f"its top '{top}' is one of layer '{self._producers.get(top)}' already: name it anew")
            self._producers[top], self.shapes[top] = layer.name, shape
        self._taken.update(bottom for bottom in layer.bottoms if bottom not in layer.tops)
        self._taken.difference_update(layer.tops)
        self._weights.append(self._weights_of(layer))
        params, downs = len(parameter.param), len(parameter.propagate_down)
        require(params <= len(layer.blobs), f"it has {params} of param, and {len(layer.blobs)} blobs")
        require(downs in (0, len(layer.bottoms)), f"it has {downs} of propagate_down: give one a bottom")
        self.layers.append(layer)
        key = layer.name.replace(".", "_") or layer.kind
        while key in self.by_name or hasattr(self.by_name, key):
            key += "_"
        self.by_name[key] = layer

    def _weights_of(self, layer: Layer) -> list[float]:
        given, count = list(layer.parameter.loss_weight), len(layer.tops)
        require(len(given) in (0, count), f"it has {len(given)} of loss_weight, and {count} tops: give one a top")
        weights = given or [1.0 if layer.is_loss and index == 0 else 0.0 for index in range(count)]
        self.loss_weights.update((top, weight) for top, weight in zip(layer.tops, weights, strict=True) if weight)
        return weights

    def _fill(self, generator: torch.Generator | None) -> list[Learnable]:
        """Fills the blobs, lets layers share those of one name, and lists them."""
        learnable: list[Learnable] = []
        owners: dict[str, tuple[Layer, int, int]] = {}  # by the blob's name: layer, index, place in the list
        for layer in self.layers:
            for index in range(len(layer.blobs)):
                given = layer.parameter.param
                spec = given[index] if index < len(given) else ParamSpec()
                with _placed(layer.parameter):
                    own = not (spec.name and isinstance(layer, UserLayer))
                    require(own, f"a module of a user's cannot share its blob '{spec.name}'")
                    if spec.name in owners:
                        first, at, entry = owners[spec.name]
                        learnable[entry] = _share(layer, index, spec, first, at, learnable[entry])
                        continue
                    layer.fill(index, generator)
                if spec.name:
                    owners[spec.name] = (layer, index, len(learnable))
                lr_mult, decay_mult = (spec.lr_mult, spec.decay_mult) if layer.learns(index) else (0.0, 0.0)
                blob = layer.blobs[index].requires_grad_(lr_mult != 0)
                learnable.append(Learnable(blob, lr_mult, decay_mult, f"{layer.name}[{index}]"))
        return learnable

    def _fold_scales(self) -> None:
        """Lets each BatchNorm compute the Scale behind it that works in place: one pass over the blob."""
        for index, (first, second) in enumerate(pairwise(self.layers)):
            if not (isinstance(first, BatchNorm) and isinstance(second, Scale)):
                continue
            in_place = first.tops == second.bottoms == second.tops and self._weights[index] == [0.0]
            shape = self.shapes[first.tops[0]]
            by_channel = len(shape) > 1 and second.axis == 1 and second.shapes[:1] == [shape[1:2]]
            if in_place and by_channel and second.blobs and False not in second.parameter.propagate_down:
                first.scale, second.folded = [second], True

    def _overwrite(self) -> None:
        """Lets each ReLU that works in place overwrite what the layer before it made and does not need itself."""
        before: Layer | None = None
        for layer, weights in zip(self.layers, self._weights, strict=True):
            if isinstance(layer, ReLU) and before is not None and layer.tops == layer.bottoms == before.tops:
                # A negative slope would lose the sign.
                layer.overwrites = not layer.parameter.relu_param.negative_slope
            folded = isinstance(layer, Scale) and layer.folded
            makes = folded or isinstance(layer, Convolution | BatchNorm | InnerProduct)
            makes = makes or (isinstance(layer, Eltwise) and layer.options.operation == layer.options.SUM)
            before = layer if makes and len(layer.tops) == 1 and weights == [0.0] else None

    def _find_last_uses(self) -> list[list[str]]:
        """For each layer, the blobs that nobody needs after it."""
        last = {blob: index for index, layer in enumerate(self.layers) for blob in (*layer.bottoms, *layer.tops)}
        dead = sorted((index, blob) for blob, index in last.items() if blob not in self.outputs)
        return [[blob for at, blob in dead if at == index] for index in range(len(self.layers))]

    def forward(
        self, blobs: Mapping[str, Tensor] | None = None, /, *, keep: Collection[str] = (), **named: Tensor
    ) -> dict[str, Tensor]:
        """Computes the net's outputs, and its loss, which is then in `loss`.

        Args:
            blobs: the tops of Input layers, by name.
            keep: blobs beside the outputs that are wanted.
            named: as blobs.

        Raises:
            NetError: an input is missing, a blob to keep is none, or a layer fails: its bottoms do not fit, or a label
                is out of range.
        """
        outputs, self.loss = self.compute({**(blobs or {}), **named}, keep)
        return outputs

    def compute(self, blobs: Mapping[str, Tensor], keep: Collection[str] = ()) -> tuple[dict[str, Tensor], Tensor]:
        """As `forward`, which is this, but returns the loss and does not keep it."""
        values = dict(blobs)
        kept: dict[str, Tensor] = {}
        loss = self.anchor
        if unknown := [blob for blob in (*values, *keep) if blob not in self.shapes]:
            raise NetError(f"net '{self.name}' has no blob '{unknown[0]}'; there are {_some(self.shapes)}")
        for layer, weights, dead in zip(self.layers, self._weights, self._last_use, strict=True):
            if layer.kind == "Input":
                if missing := [top for top in layer.tops if top not in values]:
                    raise NetError(f"net '{self.name}' needs its input '{missing[0]}': give it to forward by its name")
                continue
            bottoms = [values[bottom] for bottom in layer.bottoms]
            down = layer.parameter.propagate_down
            if down:
                bottoms = [b if wanted else b.detach() for b, wanted in zip(bottoms, down, strict=True)]
            try:
                tops = layer(*bottoms)
            except Exception as error:
                given = ", ".join(f"{name} {dims(b.shape)}" for name, b in zip(layer.bottoms, bottoms, strict=True))
                if type(error) in (NetError, RuntimeError, IndexError):  # and no subclass, such as OutOfMemoryError
                    said = (str(error).splitlines() or [type(error).__name__])[0]
                    raise NetError(f"{place_of(layer.parameter)}: {said} (over {given or 'no bottoms'})") from error
                error.add_note(f"in layer '{layer.name}' ({layer.kind}) over {given or 'no bottoms'}")
                raise
            if not layer.bottoms:  # data come as they are
                tops = [top.to(self.anchor) for top in tops]
            for top, value, weight in zip(layer.tops, tops, weights, strict=True):
                values[top] = value
                if weight:
                    loss = loss + (value.sum() if weight == 1 else value.sum() * weight)
            for blob in dead:
                if blob in keep:
                    kept[blob] = values[blob]
                del values[blob]
        return {**kept, **{blob: values[blob] for blob in self.outputs if blob in values}}, loss

    def share(self, other: Net) -> None:
        """Uses another net's blobs in layers of the same name, as a solver's test nets do.

        Raises:
            NetError: a layer's blobs have other shapes.
        """
        theirs = {layer.name: layer for layer in other.layers}
        for layer in self.layers:
            if layer.name not in theirs or not layer.blobs:
                continue
            blobs = theirs[layer.name].blobs
            alike = [b.shape for b in blobs] == [b.shape for b in layer.blobs]
            require(alike, f"layer '{layer.name}' has other blobs in net '{self.name}' than in '{other.name}'")
            if isinstance(layer, UserLayer):
                layer.module = cast(UserLayer, theirs[layer.name]).module
            layer.blobs = blobs
        self.learnable = []  # the other net's are learnt

    def load_caffemodel(self, path: str | Path) -> list[str]:
        """Copies a .caffemodel's blobs into layers of the same name; the names of these layers.

        Layers that only the file or only the net has are left alone.

        Raises:
            FileError: the file cannot be read, or is damaged.
            NetError: no layer of the net is in the file, or a layer has other blobs there. Nothing is copied then.
        """
        model = read_binary(path, Model)
        old = any(layer.HasField("layer") for layer in model.layers)
        require(not old, f"{path}: V0, the form of 2013, is left out: see Caffe's upgrade_net_proto_binary")
        blobs: dict[str, list[npt.NDArray[np.floating]]] = {}
        for layer in (*model.layer, *model.layers):
            where = f"{path}: layer '{layer.name}'"
            blobs.setdefault(layer.name, [blob_array(blob, where) for blob in layer.blobs])
        return self.load_blobs(blobs, str(path))

    def load_blobs(self, blobs: Mapping[str, Sequence[npt.NDArray[np.floating] | None]], source: str) -> list[str]:
        """Copies arrays into the blobs of layers, as `load_caffemodel`; `source` is what errors call them.

        None stands for a blob that is shared, and which another layer in `blobs` has. The names that are returned
        include layers all of whose blobs others have.
        """
        copies: dict[nn.Parameter, npt.NDArray[np.floating]] = {}
        own = f"in net '{self.name}'"
        for layer in self.layers:
            arrays, where = blobs.get(layer.name, ()), f"{source}: layer '{layer.name}'"
            complete = len(arrays) <= len(layer.blobs)
            require(complete, f"{where} has {len(arrays)} blobs, and {len(layer.blobs)} {own}")
            for index, (array, shape) in enumerate(zip(arrays, layer.shapes, strict=False)):
                if array is not None:
                    # Old files pad shapes to four axes with leading 1s.
                    fits = array.shape in (shape, (1,) * (4 - len(shape)) + shape)
                    way = "take the net that the file was made with, or give the layer another name"
                    require(fits, f"{where}: blob {index} is {dims(array.shape)}, and {dims(shape)} {own}: {way}")
                    copies[layer.blobs[index]] = array
        taken = []
        for layer in self.layers:
            found = [blob in copies for blob in layer.blobs]
            if found and all(found):
                taken.append(layer.name)
            elif layer.name in blobs:
                require(not found, f"{source}: layer '{layer.name}' has {sum(found)} blobs, and {len(found)} {own}")
        if not taken:
            raise NoLayerError(f"{source}: has no layer of net '{self.name}': it has {_some(blobs)}")
        with torch.no_grad():
            for blob, array in copies.items():
                blob.copy_(torch.tensor(array).view(blob.shape))
        return taken

    def left_out(self, taken: Collection[str]) -> str:
        """The names of the layers with blobs that are not among those that models had, for a message; "" if none."""
        return ", ".join(f"'{layer.name}'" for layer in self.layers if layer.blobs and layer.name not in taken)

    def to_parameter(self) -> Message:
        """The net with its blobs as a NetParameter, as Caffe writes it into a .caffemodel."""
        net = NetParameter(name=self.name)
        for layer in self.layers:
            parameter = net.layer.add()
            parameter.CopyFrom(layer.parameter)
            parameter.ClearField("blobs")
            parameter.blobs.extend(array_blob(layer.blob(i).detach().cpu().numpy()) for i in range(len(layer.blobs)))
        clear_private(net)
        return net

    def close(self) -> None:
        """Ends what data layers have open."""
        for layer in self.layers:
            if (source := getattr(layer, "source", None)) is not None and hasattr(source, "close"):
                source.close()


@contextmanager
def _placed(parameter: Message) -> Iterator[None]:
    """Puts a layer's place before the NetErrors inside."""
    try:
        yield
    except NetError as error:
        raise NetError(f"{place_of(parameter)}: {error}") from error


def _share(layer: Layer, index: int, spec: Message, first: Layer, at: int, entry: Learnable) -> Learnable:
    """Gives a layer the blob of another, number `at` there; its entry, with multipliers that either layer names."""
    blob, shape = first.blobs[at], layer.shapes[index]
    whose = f"blob {index} shares '{spec.name}' with {entry.owner}"
    fits = blob.numel() == torch.Size(shape).numel() if spec.share_mode == spec.PERMISSIVE else blob.shape == shape
    require(fits, f"{whose}: its shape is {dims(shape)}, that one's is {dims(blob.shape)}")
    mults = {"lr_mult": entry.lr_mult, "decay_mult": entry.decay_mult}
    known = first.parameter.param[at]
    for field in mults:
        if spec.HasField(field):
            mine, its = getattr(spec, field), getattr(known, field)
            agrees = mine == its or not known.HasField(field)
            require(agrees, f"{whose}: its {field} is {mine:g}, that one's is {its:g}")
            setattr(known, field, mine)
            mults[field] = mine
    layer.blobs[index] = blob.requires_grad_(mults["lr_mult"] != 0)
    return Learnable(blob, mults["lr_mult"], mults["decay_mult"], entry.owner)


def _included(layer: Message, phase: str, level: int, stages: set[str]) -> bool:
    """Whether a layer's rules let it into a net."""

    def met(rule: Message) -> bool:
        return (
            (not rule.HasField("phase") or ("TRAIN", "TEST")[rule.phase] == phase)
            and (not rule.HasField("min_level") or level >= rule.min_level)
            and (not rule.HasField("max_level") or level <= rule.max_level)
            and stages.issuperset(rule.stage)
            and stages.isdisjoint(rule.not_stage)
        )

    require(not (layer.include and layer.exclude), "it has include and exclude: keep one")
    if layer.include:
        return any(map(met, layer.include))
    return not any(map(met, layer.exclude))


def _some(names: Iterable[str]) -> str:
    """Names for a message: not more than twenty, the last ones."""
    names = list(names)
    return ("..., " if len(names) > 20 else "") + ", ".join(f"'{name}'" for name in names[-20:])
