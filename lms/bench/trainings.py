"""One run of `trainers.py`: a process that trains a model of another library, plain or with LMS, and prints figures.

`python trainings.py NAME [BYTES [KINDS]]`: with BYTES it trains with LMS, whose limit is the resident set after the
imports and so many bytes more, and which swaps KINDS.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

import lms
from lms.memory.resident import ResidentSet
from lms.torch.session import Session

STEPS = 8
Options = dict[str, Any]  # of LMS; none for plain training
Trained = tuple[list[Tensor], Session | None]  # what must have plain's bits
Train = Callable[[Options], Trained]


class Watch:
    """After each step of an optimizer: the most bytes resident since the step before, and the seconds so far."""

    def __init__(self) -> None:
        self._resident = ResidentSet()
        self._most = 0
        self.base = self._resident.current()
        self.peaks: list[int] = []
        self.cpu: list[float] = []
        self.seconds: list[float] = []
        self._notice_resets()
        register_optimizer_step_post_hook(self._after_step)

    def _notice_resets(self) -> None:
        """LMS resets the kernel's peak, too."""
        reset = ResidentSet.reset_peak

        def noticed(one: ResidentSet) -> None:
            self._most = max(self._most, one.peak())
            reset(one)

        ResidentSet.reset_peak = noticed  # type: ignore[assignment,method-assign]

    def _after_step(self, *_: object) -> None:
        self._resident.reset_peak()
        self.peaks.append(self._most)
        self._most = 0
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.cpu.append(used.ru_utime + used.ru_stime)
        self.seconds.append(time.perf_counter())


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, run: Callable[[], list[Tensor]], options: Options
) -> Trained:
    """A loop of one's own."""
    with lms.LMS(model, optimizer, **options) if options else nullcontext() as session:
        left = run()
    return [*left, *model.state_dict().values()], session


def noise(*shape: int, seed: int) -> Tensor:
    """The same numbers each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# transformers and trl


def with_trainer(make: Callable[[], Any], *, length: int, shortest: int = 0, batch: int = 2, **more: Any) -> Train:
    """Batches have `shortest` (else all of them `length`) to `length` tokens."""
    from transformers import Trainer, TrainingArguments

    from lms.integrations.transformers import LMSCallback

    each = batch * more.get("gradient_accumulation_steps", 1)

    def train(options: Options) -> Trained:
        torch.manual_seed(0)
        model = make()
        shapes = [length - at // batch * 37 % (length - (shortest or length) + 1) for at in range(STEPS * each)]
        tokens = [
            torch.randint(0, 2000, (one,), generator=torch.Generator().manual_seed(at)) for at, one in enumerate(shapes)
        ]
        data = [{"input_ids": one, "labels": one} for one in tokens]
        callbacks = [LMSCallback(**options)] if options else []
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, per_device_train_batch_size=batch, max_steps=STEPS, save_strategy="no", logging_steps=1, seed=1,
                use_cpu=True, report_to=[], disable_tqdm=True, train_sampling_strategy="sequential",
                **more,
            )  # fmt: skip
            trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:batch], callbacks=callbacks)
            trainer.train()
        return of_trainer(trainer, callbacks)

    return train


def of_trainer(trainer: Any, callbacks: list[Any]) -> Trained:
    """The losses and the parameters."""
    losses = [
        torch.tensor(one[name]) for one in trainer.state.log_history for name in ("loss", "eval_loss") if name in one
    ]
    return [*losses, *trainer.model.state_dict().values()], callbacks[0].session if callbacks else None


def gpt2() -> Train:
    """GPT-2 with accumulation, clipping and evaluations."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=6, n_embd=512, n_head=8, vocab_size=2000, n_positions=128)
    return with_trainer(
        lambda: GPT2LMHeadModel(config), length=128, gradient_accumulation_steps=2, max_grad_norm=0.5,
        eval_strategy="steps", eval_steps=4,
    )  # fmt: skip


def llama(width: int = 512, vocabulary: int = 2000) -> Callable[[], Any]:
    """Makes a Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=vocabulary,
    )  # fmt: skip
    return lambda: LlamaForCausalLM(config)


def llama_checkpoints(reentrant: bool) -> Train:
    """Llama with gradient checkpointing."""
    return with_trainer(
        llama(),
        length=128,
        batch=5,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )


def llama_adafactor() -> Train:
    """Llama in bfloat16 (autocast) with Adafactor."""
    return with_trainer(llama(768), length=128, batch=1, bf16=True, optim="adafactor")


def mixtral() -> Train:
    """Mixtral with batches of changing lengths."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=2000, num_local_experts=8,
    )  # fmt: skip
    return with_trainer(lambda: MixtralForCausalLM(config), length=192, shortest=64, batch=8)


def lora() -> Train:
    """Supervised fine-tuning of a LoRA over a frozen Llama, by trl and peft."""
    import datasets
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from lms.integrations.transformers import LMSCallback

    datasets.disable_progress_bars()
    words = [f"word{number}" for number in range(17)]
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    make = llama(vocabulary=len(vocabulary))

    def train(options: Options) -> Trained:
        torch.manual_seed(0)
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        )
        texts = [" ".join(words[(at + each * each) % 17] for each in range(120 + at % 8)) for at in range(8 * STEPS)]
        callbacks = [LMSCallback(**options)] if options else []
        with tempfile.TemporaryDirectory() as folder:
            arguments = SFTConfig(
                folder, per_device_train_batch_size=8, max_steps=STEPS, save_strategy="no", logging_steps=1, seed=1,
                learning_rate=1e-2, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
                disable_tqdm=True,
            )  # fmt: skip
            trainer = SFTTrainer(
                make(), arguments, train_dataset=datasets.Dataset.from_dict({"text": texts}),
                processing_class=fast, callbacks=callbacks,
                peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
            )  # fmt: skip
            trainer.train()
        return of_trainer(trainer, callbacks)

    return train


# MONAI, diffusers, PyTorch Geometric


def monai(make: Callable[[Any], nn.Module], side: int) -> Train:
    """A segmentation of volumes, and of one twice as long by sliding windows after every fourth step."""
    from monai.inferers import sliding_window_inference
    from monai.losses import DiceCELoss
    from monai.networks import nets

    def train(options: Options) -> Trained:
        torch.manual_seed(0)
        model = make(nets)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        criterion = DiceCELoss(to_onehot_y=True, softmax=True)
        long = noise(1, 1, 2 * side, side, side, seed=STEPS)

        def run() -> list[Tensor]:
            left = []
            for step in range(STEPS):
                model.train()
                image = noise(1, 1, side, side, side, seed=step)
                loss = criterion(model(image), (image > 0).float())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                left.append(loss.detach())
                if step % 4 == 3:
                    model.eval()
                    with torch.no_grad():
                        left.append(sliding_window_inference(long, (side,) * 3, 1, model).mean())
            return left

        return loop(model, optimizer, run, options)

    return train


def diffusion() -> Train:
    """The UNet2D of diffusers with clipping and an average of its parameters."""
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel

    def train(options: Options) -> Trained:
        torch.manual_seed(0)
        model = UNet2DModel(
            sample_size=32, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(96, 192),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        average, noising = EMAModel(model.parameters()), DDPMScheduler()

        def run() -> list[Tensor]:
            left = []
            for step in range(STEPS):
                image, added = noise(4, 1, 32, 32, seed=step), noise(4, 1, 32, 32, seed=-step)
                times = torch.tensor([9, 90, 400, 700])
                loss = functional.mse_loss(model(noising.add_noise(image, added, times), times).sample, added)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                average.step(model.parameters())
                left.append(loss.detach())
            return [*left, *average.shadow_params]

        return loop(model, optimizer, run, options)

    return train


def graphs() -> Train:
    """PyTorch Geometric, with batches of different sizes."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv, global_mean_pool

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = nn.ModuleList([GCNConv(16, 64), GATConv(64, 32, heads=2), SAGEConv(64, 64)])
            self.head = nn.Linear(64, 3)

        def forward(self, batch: Any) -> Tensor:
            nodes = batch.x
            for convolution in self.convolutions:
                nodes = convolution(nodes, batch.edge_index).relu()
            return self.head(global_mean_pool(nodes, batch.batch))  # type: ignore[no-any-return]

    def train(options: Options) -> Trained:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        sizes = [20_000 + 500 * (at % 8) for at in range(4 * STEPS)]
        data = [
            Data(x=noise(one, 16, seed=at), edge_index=torch.randint(0, one, (2, 4 * one)), y=torch.tensor([at % 3]))
            for at, one in enumerate(sizes)
        ]

        def run() -> list[Tensor]:
            losses = []
            for batch in DataLoader(data, 4):
                loss = functional.cross_entropy(model(batch), batch.y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            return losses

        return loop(model, optimizer, run, options)

    return train


# PyTorch, Lightning


class Block(nn.Module):
    """A perceptron beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same."""
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm(x)))), 0.1)


def of_blocks(prepare: Callable[[list[nn.Module], nn.Module], None], width: int = 512, rows: int = 512) -> Train:
    """Perceptrons after `prepare(blocks, model)`."""

    def train(options: Options) -> Trained:
        torch.manual_seed(0)
        blocks: list[nn.Module] = [Block(width) for _ in range(8)]
        model = nn.Sequential(nn.Linear(32, width), *blocks, nn.Linear(width, 4))
        prepare(blocks, model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

        def run() -> list[Tensor]:
            losses = []
            for step in range(STEPS):
                loss = functional.cross_entropy(model(noise(rows, 32, seed=step)), torch.arange(rows) % 4)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            return losses

        return loop(model, optimizer, run, options)

    return train


def compiled(by_block: bool) -> Train:
    """torch.compile."""
    import torch._inductor.codecache
    import torch._inductor.compile_fx  # else the first step would import what compiles  # noqa: F401

    def prepare(blocks: list[nn.Module], model: nn.Module) -> None:
        for one in blocks if by_block else [model]:
            one.compile()

    return of_blocks(prepare)


def fsdp2() -> Train:
    """FSDP2 on two ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("ddl")

    def prepare(blocks: list[nn.Module], model: nn.Module) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for one in [*blocks, model]:
            fully_shard(one, mesh=mesh)

    def train(options: Options) -> Trained:
        left, session = of_blocks(prepare, width=1024, rows=192)(options)
        return [one.to_local() if hasattr(one, "to_local") else one for one in left], session

    return train


def in_lightning() -> Train:
    """Lightning with workers, validation, accumulation and clipping."""
    import logging

    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    from lms.integrations.lightning import LMSCallback

    logging.getLogger("lightning").setLevel(logging.ERROR)

    class Net(lightning.LightningModule):  # type: ignore[misc]  # its library has no types
        def __init__(self) -> None:
            super().__init__()
            wide = [nn.Linear(1152, 1152) for _ in range(14)]
            self.net = nn.Sequential(
                nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), *wide, nn.Linear(1152, 4)
            )
            self.losses: list[Tensor] = []

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = functional.cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("checked", functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    def train(options: Options) -> Trained:
        lightning.seed_everything(0, verbose=False)
        data = TensorDataset(torch.randn(256 * STEPS, 1, 8, 8), torch.arange(256 * STEPS) % 4)
        net = Net()
        callbacks = [LMSCallback(**options)] if options else []
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, callbacks=callbacks,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        few = TensorDataset(*data[:256])
        trainer.fit(net, DataLoader(data, 256, num_workers=1), DataLoader(few, 256))
        left = [*net.losses, *net.state_dict().values(), trainer.callback_metrics["checked"]]
        return left, callbacks[0].session if callbacks else None

    return train


TRAININGS: dict[str, Callable[[], Train]] = {
    "GPT-2": gpt2,
    "Llama, checkpoints": lambda: llama_checkpoints(False),
    "Llama, reentrant checkpoints": lambda: llama_checkpoints(True),
    "Llama, bfloat16, Adafactor": llama_adafactor,
    "Mixtral, changing lengths": mixtral,
    "Llama, LoRA": lora,
    "SegResNet": lambda: monai(lambda nets: nets.SegResNet(3, 8, 1, 2, dropout_prob=0.1), 80),
    "UNet": lambda: monai(lambda nets: nets.UNet(3, 1, 2, (16, 32, 64), (2, 2), num_res_units=2, dropout=0.1), 96),
    "SwinUNETR": lambda: monai(lambda nets: nets.SwinUNETR(1, 2, feature_size=12, drop_rate=0.1), 64),
    "UNet2D, EMA": diffusion,
    "graphs": graphs,
    "compiled as a whole": lambda: compiled(by_block=False),
    "compiled by block": lambda: compiled(by_block=True),
    "Lightning": in_lightning,
    "FSDP2, two ranks": fsdp2,
}


def main() -> None:
    """Train, and print the figures as JSON."""
    name, *more = sys.argv[1:]
    train = TRAININGS[name]()
    torch.ones(1).sqrt()  # its first call, Adam's, may be less exact on several threads: pytorch/pytorch#188792
    watch = Watch()
    options: Options = {"limit": watch.base + int(more[0]), "swap": more[1]} if more else {}
    left, session = train(options)
    total = hashlib.blake2b(digest_size=8)
    for one in left:
        total.update(one.detach().float().flatten().view(torch.uint8).numpy().data)
    found = {name: getattr(watch, name) for name in ("base", "peaks", "cpu", "seconds")}
    found |= {"bits": total.hexdigest(), "stats": session.stats() if session is not None else {}}
    print("figures", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
