"""Ray Train over the backend ddl: Ray makes the process group, and runs the loop off the main thread."""

import threading

import ray
import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

import ddl.horovod.torch as hvd


def loop():
    assert threading.current_thread() is not threading.main_thread()
    assert dist.get_backend() == "ddl"
    assert dist.get_world_size() == 2
    rank = dist.get_rank()
    model = torch.nn.Linear(4, 1)
    torch.nn.init.ones_(model.weight)
    model = prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.full((1, 4), rank + 1.0)).sum().backward()
    optimizer.step()
    # The inputs are 1 and 2, so that the mean gradient is 1.5 on both ranks.
    assert torch.equal(model.module.weight, torch.full((1, 4), 1 - 0.5 * 1.5)), model.module.weight
    hvd.init()  # Horovod's names, in the same job
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    print(f"rank {rank}: right", flush=True)


ray.init(num_cpus=2, include_dashboard=False)
TorchTrainer(
    loop, torch_config=TorchConfig(backend="ddl"), scaling_config=ScalingConfig(num_workers=2, use_gpu=False)
).fit()
ray.shutdown()
