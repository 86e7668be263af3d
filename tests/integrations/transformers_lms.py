"""GPT-2 under the Trainer of transformers, plain and with LMSCallback: accumulation, clipping, evaluation, a checkpoint
and going on from it. Losses, parameters and what the checkpoints hold have the same bits."""

import os
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lms.integrations.transformers import LMSCallback


class Tokens(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 500, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def train(
    folder: str, first: str, callbacks: list[LMSCallback], *, resume: bool = False
) -> tuple[Trainer, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = GPT2LMHeadModel.from_pretrained(first)  # parameters that are mapped from the file
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4, eval_strategy="steps",
        eval_steps=2, save_steps=2, logging_steps=1, max_grad_norm=0.5, learning_rate=1e-3, use_cpu=True, seed=1,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    return trainer, [parameter.detach() for parameter in model.parameters()]


def losses(trainer: Trainer) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry]


with tempfile.TemporaryDirectory() as folder:
    first = f"{folder}/first"
    GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=512, n_head=2, vocab_size=500, n_positions=32)).save_pretrained(first)
    plain, expected = train(f"{folder}/plain", first, [])
    for resume in (False, True):
        callback = LMSCallback(budget=0, min_size=0, swap="activations,optimizer,parameters,gradients")
        trainer, found = train(f"{folder}/lms", first, [callback], resume=resume)
        assert losses(trainer) == losses(plain)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        stats = callback.session.stats()
        assert stats["swapped_in"] > 0, stats
        assert stats["state_in"] > 0, stats
        state = 4 * sum(one.nbytes for one in found)  # with gradients and Adam's two
        assert stats["state"] > 0.9 * state, (stats, state)
        saved, written = (load_file(f"{folder}/{name}/checkpoint-4/model.safetensors") for name in ("lms", "plain"))
        assert saved.keys() == written.keys()
        assert all(torch.equal(saved[name], one) for name, one in written.items())
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert logged[-1]["lms_moved_gb"] > 0, logged
print("right", file=sys.stderr)
