"""Times VGG16 and ResNet-50 from a prototxt beside the same net in plain PyTorch.

    python frontends/caffe/bench/against_torch.py [--rounds 20] [--threads 1]

Both nets have the same weights, and their losses are compared first. Each round runs one forward and backward of each,
in turns. The figure is the median of the rounds' ratios, ours over PyTorch's: of wall time, and of processor time,
which other programs on the machine disturb less. Then `caffe time` runs as often, and its "Average Forward-Backward" is
divided by the median of PyTorch's steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from bascule_caffe import Net, NetParameter
from bascule_caffe.messages import parse_string
from bascule_caffe.timing import time_net

Step = Callable[[], Tensor]
ITEMS = 2  # images of a batch


class Text:
    """Writes a prototxt layer by layer."""

    def __init__(self, items: int) -> None:
        shapes = f"shape {{ dim: {items} dim: 3 dim: 224 dim: 224 }} shape {{ dim: {items} }}"
        self.parts = [f'layer {{ name: "in" type: "Input" top: "data" top: "label" input_param {{ {shapes} }} }}']

    def add(self, name: str, kind: str, bottom: str, fields: str = "", in_place: bool = False) -> str:
        """Adds a layer; the name of its top."""
        top = bottom if in_place else name
        ends = f'bottom: "{bottom}" top: "{top}"'
        self.parts.append(f'layer {{ name: "{name}" type: "{kind}" {ends} {fields} }}')
        return top

    def conv(self, name: str, bottom: str, outputs: int, kernel: int, stride: int = 1, bias: bool = False) -> str:
        """Adds a convolution that keeps the size, but for its stride."""
        fields = f"num_output: {outputs} kernel_size: {kernel} stride: {stride} pad: {kernel // 2}"
        fields += f' bias_term: {str(bias).lower()} weight_filler {{ type: "msra" }}'
        return self.add(name, "Convolution", bottom, f"convolution_param {{ {fields} }}")

    def inner(self, name: str, bottom: str, outputs: int) -> str:
        """Adds an inner product."""
        fields = f'num_output: {outputs} weight_filler {{ type: "xavier" }}'
        return self.add(name, "InnerProduct", bottom, f"inner_product_param {{ {fields} }}")

    def net(self, scores: str) -> Net:
        """The net, with a loss at its end."""
        loss = f'layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "{scores}" bottom: "label" }}'
        return Net(parse_string("\n".join([*self.parts, loss]), NetParameter), "TRAIN")


def vgg16(items: int) -> tuple[Net, nn.Module]:
    """Simonyan and Zisserman, 2014, table 1, D; without Dropout, whose numbers would differ."""
    text, blob, plain, channels = Text(items), "data", [], 3
    for block, (outputs, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), 1):
        for index in range(1, count + 1):
            blob = text.conv(f"conv{block}_{index}", blob, outputs, 3, bias=True)
            blob = text.add(f"relu{block}_{index}", "ReLU", blob, in_place=True)
            plain += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            channels = outputs
        blob = text.add(f"pool{block}", "Pooling", blob, "pooling_param { kernel_size: 2 stride: 2 }")
        plain += [nn.MaxPool2d(2)]
    plain += [nn.Flatten()]
    size = 512 * 7 * 7
    for index, outputs in enumerate((4096, 4096, 1000), 6):
        blob = text.inner(f"fc{index}", blob, outputs)
        plain += [nn.Linear(size, outputs)]
        if index < 8:
            blob = text.add(f"relu{index}", "ReLU", blob, in_place=True)
            plain += [nn.ReLU(inplace=True)]
        size = outputs
    return text.net(blob), nn.Sequential(*plain)


class Bottleneck(nn.Module):
    """A block of ResNet-50 in plain PyTorch."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        self.short: nn.Module = nn.Identity()
        if channels != 4 * width:
            self.short = nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        total: Tensor = self.short(x) + self.branch(x)
        return functional.relu(total, inplace=True)


def resnet50(items: int) -> tuple[Net, nn.Module]:
    """He, Zhang, Ren and Sun, 2015, table 1; with Caffe's place for the stride, the first convolution of a block."""
    text = Text(items)

    def normalised(name: str, blob: str, relu: bool = True) -> str:
        text.add(f"bn_{name}", "BatchNorm", blob, in_place=True)
        text.add(f"scale_{name}", "Scale", blob, "scale_param { bias_term: true }", in_place=True)
        return text.add(f"relu_{name}", "ReLU", blob, in_place=True) if relu else blob

    blob = normalised("1", text.conv("conv1", "data", 64, 7, 2))
    blob = text.add("pool1", "Pooling", blob, "pooling_param { kernel_size: 3 stride: 2 }")
    plain: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    plain.append(nn.MaxPool2d(3, 2, ceil_mode=True))
    channels = 64
    for stage, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 2):
        for index in range(count):
            name, stride = f"{stage}{chr(ord('a') + index)}", 2 if index == 0 and stage > 2 else 1
            plain.append(Bottleneck(channels, width, stride))
            branch = normalised(f"{name}_2a", text.conv(f"res{name}_2a", blob, width, 1, stride))
            branch = normalised(f"{name}_2b", text.conv(f"res{name}_2b", branch, width, 3))
            branch = normalised(f"{name}_2c", text.conv(f"res{name}_2c", branch, 4 * width, 1), relu=False)
            if channels != 4 * width:
                blob = normalised(f"{name}_1", text.conv(f"res{name}_1", blob, 4 * width, 1, stride), relu=False)
            blob = text.add(f"res{name}", "Eltwise", blob, f'bottom: "{branch}"')
            blob = text.add(f"res{name}_relu", "ReLU", blob, in_place=True)
            channels = 4 * width
    blob = text.add("pool5", "Pooling", blob, "pooling_param { pool: AVE global_pooling: true }")
    plain += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    return text.net(text.inner("fc", blob, 1000)), nn.Sequential(*plain)


def alike(net: Net, plain: nn.Module, items: int) -> tuple[Step, Step]:
    """A step of each net, over the same weights and data."""
    ours = {entry.owner: entry.parameter for entry in net.learnable if entry.lr_mult}
    theirs = dict(plain.named_parameters())
    with torch.no_grad():
        if len(ours) != len(theirs):
            raise ValueError(f"ours has {len(ours)} parameters, PyTorch's {len(theirs)}")
        for parameter, blob in zip(theirs.values(), _in_order(list(ours.values()), list(theirs.values())), strict=True):
            parameter.copy_(blob)
    data, labels = torch.rand(items, 3, 224, 224), torch.arange(items)

    def step_ours() -> Tensor:
        net.zero_grad(set_to_none=True)
        net(data=data, label=labels.float())
        net.loss.backward()
        loss: Tensor = net.loss.detach()
        return loss

    def step_theirs() -> Tensor:
        plain.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(plain(data), labels)
        loss.backward()
        return loss.detach()

    return step_ours, step_theirs


def _in_order(blobs: list[Tensor], like: list[Tensor]) -> Iterator[Tensor]:
    """The blobs in the order of parameters of the same shapes: a block's short cut stands in another place."""
    left = list(blobs)
    for parameter in like:
        place = next(index for index, blob in enumerate(left) if blob.shape == parameter.shape)
        yield left.pop(place)


def seconds(step: Step) -> tuple[float, float]:
    """The wall time and the processor time of a step."""
    wall, processor = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    """Prints a line a net."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name, build in (("VGG16", vgg16), ("ResNet-50", resnet50)):
        torch.manual_seed(0)
        net, plain = build(ITEMS)
        ours, theirs = alike(net, plain, ITEMS)
        losses = ours().item(), theirs().item()
        theirs(), ours()
        rounds = []
        for index in range(options.rounds):
            pair = (ours, theirs) if index % 2 else (theirs, ours)
            first, second = seconds(pair[0]), seconds(pair[1])
            rounds.append((first, second) if index % 2 else (second, first))
        walls = [one[0] / other[0] for one, other in rounds]
        processors = [one[1] / other[1] for one, other in rounds]
        lines: list[str] = []
        time_net(net, options.rounds, lines.append)
        (timed,) = [float(line.split()[2]) / 1e3 for line in lines if line.startswith("Average Forward-Backward")]
        steps = [statistics.median(pair[place][0] for pair in rounds) for place in (0, 1)]
        print(
            f"{name}: losses {losses[0]:.6f} and {losses[1]:.6f}; {steps[0]:.2f} s and {steps[1]:.2f} s a step; "
            f"ratio of wall time {statistics.median(walls):.3f}, of processor time {statistics.median(processors):.3f} "
            f"({min(processors):.3f} to {max(processors):.3f}); caffe time {timed:.2f} s, ratio {timed / steps[1]:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
