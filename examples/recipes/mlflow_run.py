"""Log a training under LMS to MLflow: LMS's figures as metrics, its advice as tags, a page about a step as an artifact.

pip install './lms[torch,report]' mlflow scikit-learn
python examples/recipes/mlflow_run.py --budget 1MB
mlflow ui --backend-store-uri sqlite:///mlflow.db
"""

from __future__ import annotations

import argparse

import mlflow
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import lms
from lms.advice import advice
from lms.report import render
from lms.stats import Stats


def main() -> None:
    """Train on handwritten digits in one run of MLflow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="1MB", help="saved bytes that may stay in memory (1MB)")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    asked = parser.parse_args()
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    torch.manual_seed(0)
    first, hidden = torch.nn.Linear(64, asked.width), torch.nn.Linear(asked.width, asked.width)
    model = torch.nn.Sequential(first, torch.nn.ReLU(), hidden, torch.nn.ReLU(), torch.nn.Linear(asked.width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    with mlflow.start_run() as run, lms.LMS(model, optimizer, budget=asked.budget) as session:
        mlflow.log_params(vars(asked))
        for step in range(1, asked.steps + 1):
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                figures = {f"lms/{name}": value for name, value in session.stats().items() if value is not None}
                mlflow.log_metrics({"loss": loss.item(), **figures}, step)
        stats, trace = session.stats(), session.trace
        # What `lms run` says in its last lines. The keys of the dict are the fields.
        for one in advice(Stats(**stats)):  # type: ignore[arg-type]
            mlflow.set_tag(f"lms.advice.{one.rule}", one.text)
            print(f"advice: {one.text}")
        if trace is not None:
            page = render(trace, link=session.link(), plan=session.plan, ran=session.timeline, stats=stats)
            mlflow.log_text(page, "step.html")
    print(f"run {run.info.run_id}: loss {loss.item():.4f}, {stats['swapped_out']:,} bytes swapped out")


if __name__ == "__main__":
    main()
