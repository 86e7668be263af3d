"""Search with Ray Tune: each trial trains under a limit of LMS, and reports LMS's figures beside its loss.

pip install './lms[torch]' 'ray[tune]' scikit-learn
python examples/recipes/ray_tune.py --trials 8 --at-once 2 --limit 2GB
"""

from __future__ import annotations

import argparse

import ray
import torch
from ray import tune
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import lms


def trial(config: dict[str, float | str]) -> None:
    """Train on handwritten digits. Ray calls this in a process of its own for each trial."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=float(config["lr"]), momentum=0.9)
    with lms.LMS(model, optimizer, limit=str(config["limit"])) as session:
        for _ in range(20):
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stats = session.stats()
            tune.report({"loss": loss.item(), "lms_peak": stats["peak"], "lms_swapped_out": stats["swapped_out"]})


def main() -> None:
    """Search the learning rate and print the best one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--limit", default="2GB", help="what a trial may hold; all at once must fit (2GB)")
    asked = parser.parse_args()
    ray.init(num_cpus=asked.at_once, include_dashboard=False)
    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 1}),  # on a GPU {"gpu": 0.5}, and a limit of half its memory
        param_space={"lr": tune.loguniform(1e-3, 1), "limit": asked.limit},
        tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=asked.trials),
    )
    best = tuner.fit().get_best_result()
    print(f"best: lr={best.config['lr']:.3g}, loss {best.metrics['loss']:.4f}, peak {best.metrics['lms_peak']:,} bytes")


if __name__ == "__main__":
    main()
