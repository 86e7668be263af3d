"""Caffe's messages as a table: one line a message, its fields as `name number type`, and descriptors made of it.

A type is a scalar, another message, or the names of an enumeration (`MAX|AVE`, from 0 unless `=1` says otherwise).
`*` means repeated, `=` gives the default. The numbers are those of Caffe's files (caffe.proto of BVLC/caffe 1.0).
Fields without one are private: other branches of Caffe disagree about their numbers, and files never hold ours.

A blob's numbers are raw bytes here: a packed field of floats has the same form in a file, and NumPy takes it as it is.
"""

from __future__ import annotations

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

PRIVATE = 100000  # the first number of private fields

_ENGINE = "DEFAULT|CAFFE|CUDNN"
_PHASE = "TRAIN|TEST"
_IMAGES = "scale 2 float = 1; mean_file 3 string; batch_size 4 uint32; crop_size 5 uint32; mirror 6 bool"
_FILLERS = "weight_filler {} FillerParameter; bias_filler {} FillerParameter"
_PRIVATE_OF_LAYERS = "location string; foreign Foreign*"  # see messages.py

# The types of V1's layers as they write them, and as they are called today, in the order of their numbers.
_V1 = (
    "NONE: ACCURACY:Accuracy BNLL:BNLL CONCAT:Concat CONVOLUTION:Convolution DATA:Data DROPOUT:Dropout "
    "EUCLIDEAN_LOSS:EuclideanLoss FLATTEN:Flatten HDF5_DATA:HDF5Data HDF5_OUTPUT:HDF5Output IM2COL:Im2col "
    "IMAGE_DATA:ImageData INFOGAIN_LOSS:InfogainLoss INNER_PRODUCT:InnerProduct LRN:LRN "
    "MULTINOMIAL_LOGISTIC_LOSS:MultinomialLogisticLoss POOLING:Pooling RELU:ReLU SIGMOID:Sigmoid SOFTMAX:Softmax "
    "SOFTMAX_LOSS:SoftmaxWithLoss SPLIT:Split TANH:TanH WINDOW_DATA:WindowData ELTWISE:Eltwise POWER:Power "
    "SIGMOID_CROSS_ENTROPY_LOSS:SigmoidCrossEntropyLoss HINGE_LOSS:HingeLoss MEMORY_DATA:MemoryData ARGMAX:ArgMax "
    "THRESHOLD:Threshold DUMMY_DATA:DummyData SLICE:Slice MVN:MVN ABSVAL:AbsVal SILENCE:Silence "
    "CONTRASTIVE_LOSS:ContrastiveLoss EXP:Exp DECONVOLUTION:Deconvolution"
)
V1_TYPES = dict(pair.split(":") for pair in _V1.split())


def _parameters(numbers: str) -> str:
    """Fields of the form `lrn_param 118 LRNParameter` from `lrn_param:LRN:118`."""
    parts = (entry.split(":") for entry in numbers.split())
    return "; ".join(f"{name} {number} {kind}Parameter" for name, kind, number in parts)


_LAYER_PARAMETERS = _parameters(
    "transform_param:Transformation:100 loss_param:Loss:101 accuracy_param:Accuracy:102 argmax_param:ArgMax:103 "
    "concat_param:Concat:104 contrastive_loss_param:ContrastiveLoss:105 convolution_param:Convolution:106 "
    "data_param:Data:107 dropout_param:Dropout:108 dummy_data_param:DummyData:109 eltwise_param:Eltwise:110 "
    "exp_param:Exp:111 hdf5_data_param:HDF5Data:112 hinge_loss_param:HingeLoss:114 image_data_param:ImageData:115 "
    "inner_product_param:InnerProduct:117 lrn_param:LRN:118 memory_data_param:MemoryData:119 mvn_param:MVN:120 "
    "pooling_param:Pooling:121 power_param:Power:122 relu_param:ReLU:123 sigmoid_param:Sigmoid:124 "
    "softmax_param:Softmax:125 slice_param:Slice:126 tanh_param:TanH:127 threshold_param:Threshold:128 "
    "python_param:Python:130 prelu_param:PReLU:131 reshape_param:Reshape:133 log_param:Log:134 "
    "flatten_param:Flatten:135 reduction_param:Reduction:136 embed_param:Embed:137 tile_param:Tile:138 "
    "batch_norm_param:BatchNorm:139 elu_param:ELU:140 bias_param:Bias:141 scale_param:Scale:142 input_param:Input:143 "
    "crop_param:Crop:144 parameter_param:Parameter:145 recurrent_param:Recurrent:146 swish_param:Swish:147 "
    "clip_param:Clip:148"
)
_V1_PARAMETERS = _parameters(
    "concat_param:Concat:9 convolution_param:Convolution:10 data_param:Data:11 dropout_param:Dropout:12 "
    "hdf5_data_param:HDF5Data:13 image_data_param:ImageData:15 inner_product_param:InnerProduct:17 lrn_param:LRN:18 "
    "pooling_param:Pooling:19 power_param:Power:21 memory_data_param:MemoryData:22 argmax_param:ArgMax:23 "
    "eltwise_param:Eltwise:24 threshold_param:Threshold:25 dummy_data_param:DummyData:26 accuracy_param:Accuracy:27 "
    "hinge_loss_param:HingeLoss:29 relu_param:ReLU:30 slice_param:Slice:31 mvn_param:MVN:34 "
    "transform_param:Transformation:36 tanh_param:TanH:37 sigmoid_param:Sigmoid:38 softmax_param:Softmax:39 "
    "contrastive_loss_param:ContrastiveLoss:40 exp_param:Exp:41 loss_param:Loss:42"
)

TABLE = {
    "BlobShape": "dim 1 int64**",
    "BlobProto": "num 1 int32; channels 2 int32; height 3 int32; width 4 int32; data 5 bytes*; diff 6 bytes*; "
    "shape 7 BlobShape; double_data 8 bytes*; double_diff 9 bytes*",
    "Datum": "channels 1 int32; height 2 int32; width 3 int32; data 4 bytes; label 5 int32; float_data 6 float*; "
    "encoded 7 bool",
    "FillerParameter": "type 1 string = constant; value 2 float; min 3 float; max 4 float = 1; mean 5 float; "
    "std 6 float = 1; sparse 7 int32 = -1; variance_norm 8 FAN_IN|FAN_OUT|AVERAGE",
    "NetState": f"phase 1 {_PHASE} = TEST; level 2 int32; stage 3 string*",
    "NetStateRule": f"phase 1 {_PHASE}; min_level 2 int32; max_level 3 int32; stage 4 string*; not_stage 5 string*",
    "ParamSpec": "name 1 string; share_mode 2 STRICT|PERMISSIVE; lr_mult 3 float = 1; decay_mult 4 float = 1",
    "NetParameter": "name 1 string; layers 2 V1LayerParameter*; input 3 string*; input_dim 4 int32*; "
    "force_backward 5 bool; state 6 NetState; debug_info 7 bool; input_shape 8 BlobShape*; layer 100 LayerParameter*",
    "Foreign": "name string; text string",
    "LayerParameter": "name 1 string; type 2 string; bottom 3 string*; top 4 string*; loss_weight 5 float*; "
    f"param 6 ParamSpec*; blobs 7 BlobProto*; include 8 NetStateRule*; exclude 9 NetStateRule*; phase 10 {_PHASE}; "
    f"propagate_down 11 bool*; {_LAYER_PARAMETERS}; roi_pooling_param ROIPoolingParameter; "
    f"smooth_l1_loss_param SmoothL1LossParameter; {_PRIVATE_OF_LAYERS}",
    "V1LayerParameter": "layer 1 V0LayerParameter; bottom 2 string*; top 3 string*; name 4 string; "
    f"type 5 {'|'.join(V1_TYPES)}; blobs 6 BlobProto*; blobs_lr 7 float*; weight_decay 8 float*; "
    "include 32 NetStateRule*; exclude 33 NetStateRule*; loss_weight 35 float*; param 1001 string*; "
    f"blob_share_mode 1002 STRICT|PERMISSIVE*; {_V1_PARAMETERS}; {_PRIVATE_OF_LAYERS}",
    "V0LayerParameter": "name 1 string; type 2 string",
    # Of a binary model, name, type and blobs alone are read: other branches' fields have numbers that clash.
    "Model": "name 1 string; layers 2 V1Model*; layer 100 ModelLayer*",
    "ModelLayer": "name 1 string; type 2 string; blobs 7 BlobProto*",
    "V1Model": "layer 1 V0LayerParameter; name 4 string; blobs 6 BlobProto*",
    "SolverParameter": "train_net 1 string; test_net 2 string*; test_iter 3 int32*; test_interval 4 int32; "
    "base_lr 5 float; display 6 int32; max_iter 7 int32; lr_policy 8 string; gamma 9 float; power 10 float; "
    "momentum 11 float; weight_decay 12 float; stepsize 13 int32; snapshot 14 int32; snapshot_prefix 15 string; "
    "snapshot_diff 16 bool; solver_mode 17 CPU|GPU = GPU; device_id 18 int32; test_compute_loss 19 bool; "
    "random_seed 20 int64 = -1; train_net_param 21 NetParameter; test_net_param 22 NetParameter*; debug_info 23 bool; "
    "net 24 string; net_param 25 NetParameter; train_state 26 NetState; test_state 27 NetState*; "
    "snapshot_after_train 28 bool = true; regularization_type 29 string = L2; "
    "solver_type 30 SGD|NESTEROV|ADAGRAD|RMSPROP|ADADELTA|ADAM; delta 31 float = 1e-8; "
    "test_initialization 32 bool = true; average_loss 33 int32 = 1; stepvalue 34 int32*; "
    "clip_gradients 35 float = -1; iter_size 36 int32 = 1; snapshot_format 37 HDF5|BINARYPROTO = BINARYPROTO; "
    "rms_decay 38 float = 0.99; momentum2 39 float = 0.999; type 40 string = SGD; layer_wise_reduce 41 bool = true; "
    "weights 42 string*",
    "SolverState": "iter 1 int32; learned_net 2 string; history 3 BlobProto*; current_step 4 int32",
    "TransformationParameter": "scale 1 float = 1; mirror 2 bool; crop_size 3 uint32; mean_file 4 string; "
    "mean_value 5 float*; force_color 6 bool; force_gray 7 bool",
    "LossParameter": "ignore_label 1 int32; normalize 2 bool; normalization 3 FULL|VALID|BATCH_SIZE|NONE = VALID",
    "AccuracyParameter": "top_k 1 uint32 = 1; axis 2 int32 = 1; ignore_label 3 int32",
    "ArgMaxParameter": "out_max_val 1 bool; top_k 2 uint32 = 1; axis 3 int32",
    "BatchNormParameter": "use_global_stats 1 bool; moving_average_fraction 2 float = .999; eps 3 float = 1e-5",
    "BiasParameter": "axis 1 int32 = 1; num_axes 2 int32 = 1; filler 3 FillerParameter",
    "ClipParameter": "min 1 float; max 2 float",
    "ConcatParameter": "concat_dim 1 uint32 = 1; axis 2 int32 = 1",
    "ContrastiveLossParameter": "margin 1 float = 1; legacy_version 2 bool",
    "ConvolutionParameter": "num_output 1 uint32; bias_term 2 bool = true; pad 3 uint32*; kernel_size 4 uint32*; "
    f"group 5 uint32 = 1; stride 6 uint32*; {_FILLERS.format(7, 8)}; pad_h 9 uint32; pad_w 10 uint32; "
    f"kernel_h 11 uint32; kernel_w 12 uint32; stride_h 13 uint32; stride_w 14 uint32; engine 15 {_ENGINE}; "
    "axis 16 int32 = 1; force_nd_im2col 17 bool; dilation 18 uint32*",
    "CropParameter": "axis 1 int32 = 2; offset 2 uint32*",
    "DataParameter": f"source 1 string; {_IMAGES}; rand_skip 7 uint32; backend 8 LEVELDB|LMDB; "
    "force_encoded_color 9 bool; prefetch 10 uint32 = 4",
    "DropoutParameter": "dropout_ratio 1 float = 0.5; scale_train bool = true",
    "DummyDataParameter": "data_filler 1 FillerParameter*; num 2 uint32*; channels 3 uint32*; height 4 uint32*; "
    "width 5 uint32*; shape 6 BlobShape*",
    "EltwiseParameter": "operation 1 PROD|SUM|MAX = SUM; coeff 2 float*; stable_prod_grad 3 bool = true",
    "ELUParameter": "alpha 1 float = 1",
    "EmbedParameter": f"num_output 1 uint32; input_dim 2 uint32; bias_term 3 bool = true; {_FILLERS.format(4, 5)}",
    "ExpParameter": "base 1 float = -1; scale 2 float = 1; shift 3 float",
    "FlattenParameter": "axis 1 int32 = 1; end_axis 2 int32 = -1",
    "HDF5DataParameter": "source 1 string; batch_size 2 uint32; shuffle 3 bool",
    "HingeLossParameter": "norm 1 L1=1|L2",
    "ImageDataParameter": f"source 1 string; {_IMAGES.replace('batch_size 4 uint32', 'batch_size 4 uint32 = 1')}; "
    "rand_skip 7 uint32; shuffle 8 bool; "
    "new_height 9 uint32; new_width 10 uint32; is_color 11 bool = true; root_folder 12 string",
    "InnerProductParameter": f"num_output 1 uint32; bias_term 2 bool = true; {_FILLERS.format(3, 4)}; "
    "axis 5 int32 = 1; transpose 6 bool",
    "InputParameter": "shape 1 BlobShape*",
    "LogParameter": "base 1 float = -1; scale 2 float = 1; shift 3 float",
    "LRNParameter": "local_size 1 uint32 = 5; alpha 2 float = 1; beta 3 float = 0.75; "
    f"norm_region 4 ACROSS_CHANNELS|WITHIN_CHANNEL; k 5 float = 1; engine 6 {_ENGINE}",
    "MemoryDataParameter": "batch_size 1 uint32; channels 2 uint32; height 3 uint32; width 4 uint32",
    "MVNParameter": "normalize_variance 1 bool = true; across_channels 2 bool; eps 3 float = 1e-9",
    "ParameterParameter": "shape 1 BlobShape",
    "PoolingParameter": "pool 1 MAX|AVE|STOCHASTIC; kernel_size 2 uint32*; stride 3 uint32*; pad 4 uint32*; "
    "kernel_h 5 uint32; kernel_w 6 uint32; stride_h 7 uint32; stride_w 8 uint32; pad_h 9 uint32; pad_w 10 uint32; "
    f"engine 11 {_ENGINE}; global_pooling 12 bool; round_mode 13 CEIL|FLOOR; ceil_mode bool = true",
    "PowerParameter": "power 1 float = 1; scale 2 float = 1; shift 3 float",
    "PReLUParameter": "filler 1 FillerParameter; channel_shared 2 bool",
    "PythonParameter": "module 1 string; layer 2 string; param_str 3 string; share_in_parallel 4 bool",
    "RecurrentParameter": f"num_output 1 uint32; {_FILLERS.format(2, 3)}; debug_info 4 bool; expose_hidden 5 bool",
    "ReductionParameter": "operation 1 SUM=1|ASUM|SUMSQ|MEAN; axis 2 int32; coeff 3 float = 1",
    "ReLUParameter": f"negative_slope 1 float; engine 2 {_ENGINE}",
    "ReshapeParameter": "shape 1 BlobShape; axis 2 int32; num_axes 3 int32 = -1",
    "ROIPoolingParameter": "pooled_h uint32; pooled_w uint32; spatial_scale float = 1",
    "ScaleParameter": "axis 1 int32 = 1; num_axes 2 int32 = 1; filler 3 FillerParameter; bias_term 4 bool; "
    "bias_filler 5 FillerParameter",
    "SigmoidParameter": f"engine 1 {_ENGINE}",
    "SliceParameter": "slice_dim 1 uint32 = 1; slice_point 2 uint32*; axis 3 int32 = 1",
    "SmoothL1LossParameter": "sigma float = 1",
    "SoftmaxParameter": f"engine 1 {_ENGINE}; axis 2 int32 = 1",
    "SwishParameter": "beta 1 float = 1",
    "TanHParameter": f"engine 1 {_ENGINE}",
    "ThresholdParameter": "threshold 1 float",
    "TileParameter": "axis 1 int32 = 1; tiles 2 int32",
}

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = ("float", "int32", "int64", "uint32", "bool", "string", "bytes")


def _add_field(message: Message, text: str) -> None:
    """Adds the field that `text` describes, such as `pool 1 MAX|AVE = MAX`, to a DescriptorProto."""
    declared, _, default = text.partition(" = ")
    *name_number, kind = declared.split()
    number = int(name_number[1]) if len(name_number) == 2 else PRIVATE + len(message.field)
    field = message.field.add(name=name_number[0], number=number)
    field.label = _Field.LABEL_REPEATED if kind.endswith("*") else _Field.LABEL_OPTIONAL
    field.options.packed = kind.endswith("**")
    kind = kind.rstrip("*")
    if kind in _SCALARS:
        field.type = getattr(_Field, f"TYPE_{kind.upper()}")
    elif kind in TABLE:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".caffe.{kind}"
    else:
        field.type, field.type_name = _Field.TYPE_ENUM, f".caffe.{message.name}.{name_number[0].title()}"
        enumeration = message.enum_type.add(name=name_number[0].title())
        value = 0
        for entry in kind.split("|"):
            label, _, given = entry.partition("=")
            value = int(given) if given else value
            enumeration.value.add(name=label, number=value)
            value += 1
    if not field.options.packed:
        field.ClearField("options")
    if default:
        field.default_value = default


def build() -> dict[str, type[Message]]:
    """The message classes by name, made from the table in a descriptor pool of their own."""
    file = descriptor_pb2.FileDescriptorProto(name="bascule_caffe.proto", package="caffe", syntax="proto2")
    for name, fields in TABLE.items():
        message = file.message_type.add(name=name)
        for text in fields.split("; "):
            _add_field(message, text)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"caffe.{name}")) for name in TABLE}
