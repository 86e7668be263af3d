"""A training step that is soon bound by its link: cheap operations on large tensors, swapped to a file.

Arguments: SPILL_DIR STEPS SHARE TRACE. Prints the passes' seconds as JSON; writes the step to TRACE ("-": not).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import lms

# Tensors of 16 MiB. The kernel lets a disk that it throttles to R bytes a second first have some 0.04 R at once, each
# time that it was idle: a step's copies must take much longer.
LAYERS, SIZE = 64, 4 << 20
WARM = 3  # passes that warm up, record, and follow the first plan


class Layer(torch.nn.Module):
    """Saves what it is given, and computes little."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A softer x. Of two operations one saves x and the other its own result, which is the next layer's x."""
        return torch.tanh(x * self.scale)


def main(spill: str, steps: int, share: float, trace: str) -> None:
    """Train, print, write."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Layer() for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(SIZE)
    saved = LAYERS * 4 * SIZE  # what each layer gives the next
    seconds = []
    with lms.LMS(model, optimizer, budget=int(share * saved), spill_dir=spill) as session:
        for _ in range(steps + WARM):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            seconds.append(session.stats()["last_seconds"])
        stats = session.stats()
        step = session.trace
        assert step is not None
        if step.saved != saved:
            raise RuntimeError(f"{step.saved} bytes were saved, and {saved} were expected: the share is another")
        if trace != "-":
            step.save(Path(trace))
    print(json.dumps({"seconds": seconds[WARM:], "saved": step.saved, "stats": stats}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
