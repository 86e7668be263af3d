"""A training of three steps whose learning rate `lms tune` chooses."""

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=parser.parse_args().lr)
data = torch.randn(256, 64)
for step in range(3):
    loss = (model(data) - data[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss={loss.item():.6f}")
