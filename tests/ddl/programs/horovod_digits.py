"""Written from Horovod's documentation: what its PyTorch example for MNIST calls, on scikit-learn's digits.

The two imports of ddl are the only lines that Horovod does not have.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as functional
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ddl.horovod as horovod
import ddl.horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-mixed-precision", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--batches-per-allreduce", type=int, default=1)
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--num-proc", type=int)  # where no launcher has started this
parser.add_argument("--hosts")
parser.add_argument("--communication")


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


def train(args: argparse.Namespace) -> float:
    """The share of the test images that are named rightly at the end."""

    def train_epoch(epoch: int) -> None:
        model.train()
        train_sampler.set_epoch(epoch)
        for number, (data, target) in enumerate(train_loader):
            optimizer.zero_grad()
            for first in range(0, len(data), 16):
                part = slice(first, first + 16)
                with torch.autocast("cpu", enabled=args.use_mixed_precision):
                    loss = functional.nll_loss(model(data[part]), target[part])
                scaler.scale(loss / args.batches_per_allreduce).backward()
            if args.clip or args.use_mixed_precision:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                if args.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()
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
    # The workers are processes that ranks start.
    workers = {"num_workers": 1, "multiprocessing_context": "forkserver", "persistent_workers": True}
    train_loader = DataLoader(
        train_set,
        16 * args.batches_per_allreduce,
        sampler=train_sampler,
        **(workers if args.use_mixed_precision else {}),
    )
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test_set, batch_size=100, sampler=test_sampler)

    model = Net()
    lr_scaler = args.batches_per_allreduce * hvd.size() if not args.use_adasum else 1
    if args.use_adasum and hvd.nccl_built():
        lr_scaler = args.batches_per_allreduce * hvd.local_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=0.5)
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
    scaler = torch.amp.GradScaler("cpu", enabled=args.use_mixed_precision)

    for epoch in range(1, args.epochs + 1):
        train_epoch(epoch)
        accuracy = test()
    assert hvd.allgather_object(accuracy) == [accuracy] * hvd.size()
    return accuracy


if __name__ == "__main__":
    args = parser.parse_args()
    if args.num_proc:
        accuracies = horovod.run(
            train,
            args=(args,),
            np=args.num_proc,
            hosts=args.hosts,
            use_gloo=args.communication == "gloo",
            use_mpi=args.communication == "mpi",
        )
        print(f"of each rank: {accuracies}")
    else:
        train(args)
