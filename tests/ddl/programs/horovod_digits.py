"""Written from Horovod's documentation: what its PyTorch example for MNIST calls, on scikit-learn's digits.

The import is the only line that Horovod does not have.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as functional
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ddl.horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--batches-per-allreduce", type=int, default=1)
parser.add_argument("--clip", type=float, default=0.0)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
cuda = torch.cuda.is_available() and hvd.cuda_built()
if cuda:
    torch.cuda.set_device(hvd.local_rank())
torch.set_num_threads(1)

images, labels = load_digits(return_X_y=True)
inputs = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
targets = torch.tensor(labels)
train_set, test_set = TensorDataset(inputs[:1500], targets[:1500]), TensorDataset(inputs[1500:], targets[1500:])
train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_set, batch_size=16 * args.batches_per_allreduce, sampler=train_sampler)
test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank())
test_loader = DataLoader(test_set, batch_size=100, sampler=test_sampler)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 10, 3)
        self.first = nn.Linear(90, 50)
        self.second = nn.Linear(50, 10)

    def forward(self, x):
        x = functional.relu(functional.max_pool2d(self.convolution(x), 2))
        x = functional.relu(self.first(x.view(-1, 90)))
        return functional.log_softmax(self.second(functional.dropout(x, training=self.training)), dim=1)


model = Net()
scaler = args.batches_per_allreduce * hvd.size() if not args.use_adasum else 1
if args.use_adasum and hvd.nccl_built():
    scaler = args.batches_per_allreduce * hvd.local_size()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scaler, momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)


def train(epoch: int) -> None:
    model.train()
    train_sampler.set_epoch(epoch)
    for number, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        for first in range(0, len(data), 16):
            part = slice(first, first + 16)
            loss = functional.nll_loss(model(data[part]), target[part])
            (loss / args.batches_per_allreduce).backward()
        if args.clip:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        if number % 20 == 0 and hvd.rank() == 0:
            print(f"epoch {epoch}: {number * len(data)}/{len(train_sampler)} loss {loss.item():.4f}", flush=True)


def metric_average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value), name=name).item()


def test() -> float:
    model.eval()
    loss = right = 0.0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            loss += functional.nll_loss(output, target, reduction="sum").item()
            right += (output.argmax(1) == target).float().sum().item()
    loss = metric_average(loss / len(test_sampler), "avg_loss")
    right = metric_average(right / len(test_sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"test: loss {loss:.4f}, accuracy {right:.4f}", flush=True)
    return right


for epoch in range(1, args.epochs + 1):
    train(epoch)
    accuracy = test()
assert hvd.allgather_object(accuracy) == [accuracy] * hvd.size()
