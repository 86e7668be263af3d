"""torchrun's agents on two hosts: their ranks meet in PyTorch's store and talk over TCP."""

import sys
from pathlib import Path

import pytest

from testbed import cluster, running

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/ddp_digits/train.py"


@pytest.mark.root
@pytest.mark.alone
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("needs_testbed")
def test_two_agents_train_what_one_process_trains_with_the_same_bits_on_every_rank() -> None:
    torchrun = [Path(sys.executable).with_name("torchrun"), "--nnodes", "2", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "h0:29777", "--rdzv-id", "job"]
    environment = {"PYTHONPATH": str(ROOT / "ddl/src"), "OMP_NUM_THREADS": "1"}
    with running(cluster([1, 1], link="1gbit")) as bed:
        agents = [bed.popen(host, [*torchrun, EXAMPLE, "--epochs", "2"], env=environment) for host in ("h0", "h1")]
        outputs = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    said = "".join(out for out, _ in outputs)
    assert "parameters: the same bits on every rank" in said
    assert "epoch 2: loss 0.362328" in said
