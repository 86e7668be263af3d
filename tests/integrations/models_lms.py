"""Models and trainers that others wrote, plain and with LMS: losses, parameters and evaluations have the same bits.

Each training moves activations, optimizer state, parameters and gradients with a budget of 0.
"""

import os
import sys
import tempfile
from collections.abc import Callable

os.environ["HF_HUB_OFFLINE"] = "1"

import datasets
import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.networks.nets import SegResNet, SwinUNETR, UNet
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GCNConv, SAGEConv, global_mean_pool
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

import lms
from lms.integrations.transformers import LMSCallback

SWAP = {"budget": 0, "min_size": 0, "swap": "activations,optimizer,parameters,gradients"}
# What a training leaves, and LMS's figures if it had LMS.
Result = tuple[list[torch.Tensor], dict[str, float] | None]

datasets.disable_progress_bars()


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def result(trainer: Trainer, callbacks: list[LMSCallback]) -> Result:
    losses = [torch.tensor(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    stats = callbacks[0].session.stats() if callbacks else None
    return [*losses, *trainer.model.state_dict().values()], stats


def of_transformers(make: Callable[[], nn.Module], *, shortest: int = 32, **more: object) -> Callable[[bool], Result]:
    """Batches have `shortest` to 32 tokens."""

    def train(swaps: bool) -> Result:
        torch.manual_seed(0)
        model = make()
        lengths = [shortest + at // 4 * 7 % (33 - shortest) for at in range(24)]
        tokens = [
            torch.randint(0, 500, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths
        ]
        callbacks = [LMSCallback(**SWAP)] if swaps else []
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, per_device_train_batch_size=4, max_steps=6, save_strategy="no", logging_steps=1, seed=1,
                learning_rate=1e-3, use_cpu=True, report_to=[], disable_tqdm=True, train_sampling_strategy="sequential",
                **more,
            )  # fmt: skip
            data = [{"input_ids": one, "labels": one} for one in tokens]
            trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
            trainer.train()
        return result(trainer, callbacks)

    return train


def llama(vocabulary: int = 500) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=vocabulary,
        )
    )  # fmt: skip


def mixtral() -> MixtralForCausalLM:
    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=500, num_local_experts=4,
        )
    )  # fmt: skip


def lora(swaps: bool) -> Result:
    """Supervised fine-tuning of a LoRA over a frozen Llama, by trl and peft."""
    torch.manual_seed(0)
    words = [f"word{number}" for number in range(17)]
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    texts = [" ".join(words[at % 7 : at % 7 + 4 + at % 6]) for at in range(32)]
    callbacks = [LMSCallback(**SWAP)] if swaps else []
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder, per_device_train_batch_size=4, max_steps=6, save_strategy="no", logging_steps=1, seed=1,
            learning_rate=1e-2, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = SFTTrainer(
            llama(len(vocabulary)), arguments, train_dataset=datasets.Dataset.from_dict({"text": texts}),
            processing_class=fast, callbacks=callbacks,
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        )  # fmt: skip
        trainer.train()
    return result(trainer, callbacks)


def watched(
    model: nn.Module, optimizer: torch.optim.Optimizer, run: Callable[[], list[torch.Tensor]], swaps: bool
) -> Result:
    """Of a loop of one's own."""
    stats = None
    if swaps:
        with lms.LMS(model, optimizer, **SWAP) as session:
            left = run()
        stats = session.stats()
    else:
        left = run()
    return [*left, *model.state_dict().values()], stats


def of_monai(make: Callable[[], nn.Module], side: int = 32) -> Callable[[bool], Result]:
    """A segmentation of volumes, and of one twice as long by sliding windows after each epoch."""

    def train(swaps: bool) -> Result:
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        criterion = DiceCELoss(to_onehot_y=True, softmax=True)
        images = [random(1, 1, side, side, side, seed=seed) for seed in range(2)]
        long = random(1, 1, 2 * side, side, side, seed=2)

        def run() -> list[torch.Tensor]:
            left = []
            for _ in range(2):
                model.train()
                for image in images:
                    loss = criterion(model(image), (image > 0).float())
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    left.append(loss.detach())
                model.eval()
                with torch.no_grad():
                    left.append(sliding_window_inference(long, (side,) * 3, 1, model))
            return left

        return watched(model, optimizer, run, swaps)

    return train


def diffusion(swaps: bool) -> Result:
    """diffusers' UNet2D with clipping, and an average of its parameters that is swapped in for a sample."""
    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=16, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    average, noising = EMAModel(model.parameters()), DDPMScheduler()

    def run() -> list[torch.Tensor]:
        left = []
        for step in range(5):
            image, noise, times = (
                random(2, 1, 16, 16, seed=step),
                random(2, 1, 16, 16, seed=-step),
                torch.tensor([9, 90]),
            )
            loss = nn.functional.mse_loss(model(noising.add_noise(image, noise, times), times).sample, noise)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.step(model.parameters())
            left.append(loss.detach())
        average.store(model.parameters())
        average.copy_to(model.parameters())
        with torch.no_grad():
            left.append(model(image, times).sample)
        average.restore(model.parameters())
        return [*left, *average.shadow_params]

    return watched(model, optimizer, run, swaps)


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([GCNConv(16, 64), GATConv(64, 32, heads=2), SAGEConv(64, 64)])
        self.head = nn.Linear(64, 3)

    def forward(self, batch: Data) -> torch.Tensor:
        nodes = batch.x
        for convolution in self.convolutions:
            nodes = convolution(nodes, batch.edge_index).relu()
        return self.head(global_mean_pool(nodes, batch.batch))


def graphs(swaps: bool) -> Result:
    """PyTorch Geometric, with batches of different sizes."""
    torch.manual_seed(0)
    model = GraphNet()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    data = [
        Data(x=random(20 + at, 16, seed=at), edge_index=torch.randint(0, 20 + at, (2, 80)), y=torch.tensor([at % 3]))
        for at in range(16)
    ]

    def run() -> list[torch.Tensor]:
        losses = []
        for batch in [*DataLoader(data, 4)] * 2:
            loss = nn.functional.cross_entropy(model(batch), batch.y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    return watched(model, optimizer, run, swaps)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))), 0.1)


def compiled(by_block: bool) -> Callable[[bool], Result]:
    """torch.compile, of the whole model or block by block."""

    def train(swaps: bool) -> Result:
        torch.manual_seed(0)
        torch._dynamo.reset()
        blocks = [Block() for _ in range(4)]
        model = nn.Sequential(nn.Linear(32, 64), *blocks, nn.Linear(64, 4))
        for one in blocks if by_block else [model]:
            one.compile()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

        def run() -> list[torch.Tensor]:
            losses = []
            for step in range(6):
                loss = nn.functional.cross_entropy(model(random(16, 32, seed=step)), torch.arange(16) % 4)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            return losses

        return watched(model, optimizer, run, swaps)

    return train


TRAININGS = {
    "Llama, checkpoints": of_transformers(llama, gradient_checkpointing=True),
    "Llama, reentrant checkpoints": of_transformers(
        llama, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}
    ),
    "Llama, bfloat16, Adafactor": of_transformers(llama, bf16=True, optim="adafactor"),
    "Mixtral, changing lengths": of_transformers(mixtral, shortest=8),
    "Llama, LoRA": lora,
    "SegResNet": of_monai(lambda: SegResNet(3, 8, 1, 2, dropout_prob=0.1)),
    "UNet": of_monai(lambda: UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=2, dropout=0.1)),
    "SwinUNETR": of_monai(lambda: SwinUNETR(1, 2, feature_size=12, drop_rate=0.1), side=64),
    "UNet2D, EMA": diffusion,
    "graphs": graphs,
    "compiled as a whole": compiled(by_block=False),
    "compiled by block": compiled(by_block=True),
}

for name, train in TRAININGS.items():
    expected, _ = train(False)
    found, stats = train(True)
    assert len(found) == len(expected), name
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), name
    assert stats["swapped_in"] > 0, (name, stats)
    print(f"{name}: the same bits", file=sys.stderr, flush=True)
print("right", file=sys.stderr)
