"""Older forms of a net as today's: V1 layers, inputs beside the layers, transformations among a data layer's fields."""

from __future__ import annotations

from itertools import zip_longest

from google.protobuf.message import Message

from bascule_caffe.errors import NetError
from bascule_caffe.messages import BlobShape, LayerParameter, NetParameter
from bascule_caffe.schema import V1_TYPES

_OWN = ("layer", "type", "param", "blob_share_mode", "blobs_lr", "weight_decay")  # fields that V1 has in another form
_V1_NAMES = list(V1_TYPES)


def upgraded(net: Message) -> Message:
    """A copy of a NetParameter in today's form.

    Raises:
        NetError: the net is V0, or mixes forms.
    """
    new = NetParameter()
    new.CopyFrom(net)
    if net.layers and net.layer:
        both = "the net has both `layers` (of 2013) and `layer` (since 2014): keep one form"
        raise NetError(f"{net.layers[0].location}: {both}")
    new.ClearField("layers")
    for old in net.layers:
        _upgrade_layer(old, new.layer.add())
    for layer in new.layer:
        _upgrade_transformation(layer)
        if layer.pooling_param.HasField("ceil_mode"):
            if not layer.pooling_param.ceil_mode:
                layer.pooling_param.round_mode = layer.pooling_param.FLOOR
            layer.pooling_param.ClearField("ceil_mode")
    if net.input:
        _upgrade_input(net, new)
    return new


def _upgrade_layer(old: Message, new: Message) -> None:
    place = f"{old.location}: layer '{old.name or old.layer.name}': "
    if old.HasField("layer"):
        raise NetError(f"{place}V0, the form of 2013, is left out: convert it with Caffe's upgrade_net_proto_text")
    for field, value in old.ListFields():
        if field.name in _OWN:
            continue
        if field.is_repeated or field.message_type:
            getattr(new, field.name).MergeFrom(value)
        else:
            setattr(new, field.name, value)
    new.type = V1_TYPES[_V1_NAMES[old.type]]
    specs = zip_longest(old.param, old.blob_share_mode, old.blobs_lr, old.weight_decay)
    for name, share_mode, lr_mult, decay_mult in specs:  # None where a list is shorter: the field stays unset
        new.param.add(name=name, share_mode=share_mode, lr_mult=lr_mult, decay_mult=decay_mult)


def _upgrade_transformation(layer: Message) -> None:
    """Moves the transformation of a data layer's own fields to transform_param."""
    for kind, own in (("Data", layer.data_param), ("ImageData", layer.image_data_param)):
        for field in ("scale", "mean_file", "crop_size", "mirror"):
            if layer.type == kind and own.HasField(field):
                setattr(layer.transform_param, field, getattr(own, field))
                own.ClearField(field)


def _upgrade_input(net: Message, new: Message) -> None:
    """Makes the net's inputs a layer at its beginning."""
    shapes, dims, count = list(net.input_shape), list(net.input_dim), len(net.input)
    if not shapes:
        shapes = [BlobShape(dim=dims[start : start + 4]) for start in range(0, len(dims), 4)]
        if len(dims) != 4 * count:
            raise NetError(f"the net has {count} of input, and {len(dims)} of input_dim: each input takes 4")
    if len(shapes) != count:
        raise NetError(f"the net has {count} of input, and {len(shapes)} of input_shape: give one an input")
    layer = LayerParameter(name="input", type="Input", top=net.input)
    layer.input_param.shape.extend(shapes)
    layers = [layer, *new.layer]
    for field in ("input", "input_dim", "input_shape", "layer"):
        new.ClearField(field)
    new.layer.extend(layers)
