"""Lightning over the backend ddl, by its strategy's own argument.

Two ranks, which ci/integrations starts in several ways.
"""

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

import ddl.horovod.torch as hvd


class Line(lightning.LightningModule):
    """A line that is pushed down by the inputs' mean."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(4, 1)
        torch.nn.init.ones_(self.line.weight)

    def training_step(self, batch, _):
        return self.line(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def on_train_end(self):
        assert dist.get_backend() == "ddl"
        assert dist.get_world_size() == 2
        # One step: the inputs are 1 and 2, so that the mean gradient is 1.5 on both ranks.
        assert torch.equal(self.line.weight, torch.full((1, 4), 1 - 0.5 * 1.5)), self.line.weight
        hvd.init()  # Horovod's names, in the same job
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
        print(f"rank {self.global_rank}: right", flush=True)


inputs = torch.arange(1.0, 3).view(2, 1).expand(2, 4)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend="ddl"),
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Line(), DataLoader(TensorDataset(inputs), batch_size=1))
