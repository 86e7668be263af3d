"""What lms/bench/tune.py searches: a convolutional network on random data, that waits after each step for its data."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--idle", type=float, default=0.0, help="seconds after each step in which nothing is computed")
asked = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(8)]
model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *layers, nn.Conv2d(16, 3, 3, padding=1))
optimizer = torch.optim.SGD(model.parameters(), lr=asked.lr)
images = torch.randn(4, 3, 256, 256)
cpu = 0.0
for step in range(asked.steps):
    began = time.process_time()
    loss = (model(images) - images).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    cpu += time.process_time() - began
    print(f"step {step + 1}: loss={loss.item():.6f}")
    time.sleep(asked.idle)
print(f"a step computes for {cpu / asked.steps:.4f} s")
