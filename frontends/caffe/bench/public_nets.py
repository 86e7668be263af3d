"""Counts over a folder of prototxts how many nets parse, and run forward and backward with random weights.

    python frontends/caffe/bench/public_nets.py FOLDER [-v]

It fetches nothing. A file counts as a net if it has layers, and is no solver with a net in it. The figure is the part
that runs of the nets whose layer types are all supported, among them those that do not parse. Data layers become inputs
of one item (two, if one fails), whose shape is tried from a few: that of the transformation's crop, or those of
ImageNet, CIFAR and MNIST. Labels are zeros.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from google.protobuf.message import Message

from bascule_caffe import CaffeError, Net, NetParameter, SolverParameter, parse_text
from bascule_caffe.layer import DATA, TYPES
from bascule_caffe.schema import V1_TYPES
from bascule_caffe.upgrade import upgraded

TYPE = r"layers?\s*:?\s*\{[^{}]*?\btype\s*:\s*[\"']?(\w+)"  # in the text of a net that does not parse
IMAGES = ((3, 224, 224), (3, 32, 32), (1, 28, 28), (2, 28, 28))


def guesses(net: Message, items: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yields shapes for the tops of data layers and inputs."""
    fixed: dict[str, tuple[int, ...]] = {}
    loaded: list[tuple[str, str, int]] = []  # a top, what it is, the crop
    for layer in net.layer:
        if layer.type == "Input":
            for index, top in enumerate(layer.top):
                shape = layer.input_param.shape[min(index, len(layer.input_param.shape) - 1)].dim
                fixed[top] = (items, *shape[1:]) if len(shape) > 2 else tuple(shape)
        elif layer.type in DATA:
            names = [(top, "image" if index == 0 else "label") for index, top in enumerate(layer.top)]
            loaded += [(*name, int(layer.transform_param.crop_size)) for name in names]
    for image in IMAGES:
        for label in ((items,), (items, 1), (items, 1, *image[1:])):
            guess = dict(fixed)
            for top, what, crop in loaded:
                picture = (3 if crop else image[0], crop or image[1], crop or image[2])
                guess[top] = (items, *picture) if what == "image" else label
            yield guess
        if not loaded:
            return


def run(net: Message, phase: str) -> float:
    """Builds a net and runs it forward and backward once; the seconds of both. Raises what the last try raises."""
    error: Exception = CaffeError("no shape to try")
    for items in (1, 2):
        for shapes in guesses(net, items):
            try:
                built = Net(net, phase, inputs=shapes)
            except CaffeError as caught:
                error = caught
                continue
            blobs = {
                top: torch.rand(shape)
                if (len(shape) > 2 and shape[1] > 1) or "label" not in top
                else torch.zeros(shape)
                for layer in built.layers
                if layer.kind == "Input"
                for top, shape in ((top, built.shapes[top]) for top in layer.tops)
            }
            try:
                start = time.perf_counter()
                outputs = built(blobs)
                loss = built.loss if built.loss.requires_grad else sum(o.sum() for o in outputs.values())
                if isinstance(loss, torch.Tensor) and loss.requires_grad:
                    loss.backward()
                return time.perf_counter() - start
            except (RuntimeError, CaffeError) as caught:
                error = caught
    raise error


def _is_solver(path: Path) -> bool:
    """A solver may have its net in it."""
    with suppress(CaffeError):
        parse_text(path, SolverParameter)
        return True
    return False


def main() -> None:
    """Counts, and prints what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-v", "--verbose", action="store_true", help="print each net")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    seen = set()
    for path in sorted(options.folder.rglob("*")):
        if path.suffix not in (".prototxt", ".pt") or path.is_dir():
            continue
        text = path.read_text(errors="replace")
        if not re.search(r"^\s*layers?\s*:?\s*\{", text, re.M) or text in seen or _is_solver(path):
            continue
        seen.add(text)
        counts["nets"] += 1
        net: Message | None = None
        said = ""
        try:
            net = upgraded(parse_text(path, NetParameter))
            types = {layer.type for layer in net.layer}
            counts["parsed"] += 1
        except CaffeError as error:
            said = str(error)
            types = {V1_TYPES.get(name, name) for name in re.findall(TYPE, text)}
        if unsupported := types - {*TYPES, *DATA}:
            missing.update(unsupported)
            said = said or f"types not supported: {', '.join(sorted(unsupported))}"
        else:
            counts["supported"] += 1
            if net is not None:
                phase = "TRAIN" if any(name.endswith("Loss") for name in types) else "TEST"
                try:
                    said = f"ran in {run(net, phase):.1f} s"
                    counts["ran"] += 1
                except (CaffeError, RuntimeError) as error:
                    said = str(error)
            if not said.startswith("ran") and not options.verbose:
                print(f"{path}: {said}")
        if options.verbose:
            print(f"{path}: {said}", flush=True)
    print(f"{counts['nets']} distinct nets; {counts['parsed']} parse; {counts['supported']} have supported types only")
    print(
        f"of these, {counts['ran']} ({100 * counts['ran'] / max(1, counts['supported']):.0f}%) run forward and backward"
    )
    print("types that are missing most:", ", ".join(f"{name} {count}" for name, count in missing.most_common(20)))


if __name__ == "__main__":
    main()
