"""Lightning, plain and with LMSCallback: workers, validation, accumulation, clipping. The same bits, and an exception
closes the session."""

import logging
import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lms
from lms.integrations.lightning import LMSCallback

logging.getLogger("lightning").setLevel(logging.ERROR)


class Net(lightning.LightningModule):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        wide = [nn.Linear(288, 288) for _ in range(12)]  # more than the pager keeps at least
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), *wide, nn.Linear(288, 4)
        )

    def training_step(self, batch, index):
        if self.fails and index == 2:
            raise ValueError("on purpose")
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log("checked", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def train(*callbacks: LMSCallback, fails: bool = False) -> tuple[lightning.Trainer, list[torch.Tensor]]:
    lightning.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(24, 1, 8, 8), torch.arange(24) % 4)
    net = Net(fails)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, callbacks=list(callbacks),
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(net, DataLoader(data, 4, num_workers=1), DataLoader(data, 8))
    return trainer, [*net.state_dict().values(), trainer.callback_metrics["checked"]]


_, expected = train()
callback = LMSCallback(budget=0, min_size=0, swap="activations,optimizer,parameters,gradients")
trainer, found = train(callback)
assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
assert trainer.callback_metrics["lms_moved_gb"] > 0
assert callback.session.stats()["state_in"] > 0
try:
    train(LMSCallback(budget=0), fails=True)
except ValueError:
    lms.enable(budget=0)  # refused if a session were open
    lms.disable()
    print("right", file=sys.stderr)
