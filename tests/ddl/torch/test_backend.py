"""The entry point: `import torch` finds the backend, at no cost and no risk."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

import ddl
from ddl.errors import LaunchError
from ddl.torch import groups, job, process_group, rendezvous

SCRIPT = "import torch.distributed as dist; dist.init_process_group('ddl')"
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def test_import_torch_knows_the_backend(command: Callable[..., object]) -> None:
    code = "import sys, torch.distributed as d; print('ddl' in d.Backend.backend_list, 'ddl.job' in sys.modules)"
    done = command([sys.executable, "-c", code], timeout=60)
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.alone
def test_the_entry_point_takes_half_a_percent_of_import_torch_and_loads_no_mpi(command: Callable[..., object]) -> None:
    code = """
import sys, time
start = time.process_time()
import torch
imported = time.process_time()
before = set(sys.modules)
from bascule_ddl_torch import register
register()
print((time.process_time() - imported) / (imported - start), "libmpi" in open("/proc/self/maps").read())
print(sorted(name for name in set(sys.modules) - before if not name.startswith(("ddl", "bascule_ddl_torch"))))
"""
    # Without torch's own call of it, which would have done the work already.
    run = [sys.executable, "-c", code]
    found = [command(run, timeout=60, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout.splitlines() for _ in range(2)]
    assert min(float(lines[0].split()[0]) for lines in found) < 0.005, found
    assert all(lines[0].split()[1] == "False" for lines in found)
    assert found[0][1] == "[]"


def test_a_module_ddl_of_somebody_elses_does_not_break_import_torch(command: Callable[..., object]) -> None:
    own = "own = types.ModuleType('ddl'); own.__file__ = '/home/sql/ddl.py'; sys.modules['ddl'] = own"
    done = command([sys.executable, "-c", f"import sys, types; {own}; import torch; print('imported'); {SCRIPT}"],
                   timeout=60, **ALONE)  # fmt: skip
    assert done.stdout.startswith("imported"), done.stdout
    assert done.returncode == 1
    assert re.search(
        r"RuntimeError: the backend ddl could not be loaded at `import torch`: No module named 'ddl\.torch'.*"
        r"; `ddl` is /home/sql/ddl\.py here, and must be the package of bascule-ddl",
        done.stdout,
    ), done.stdout


CHANGED = """
import sys, torch.distributed as dist
its = dist.Backend.register_backend
{change}
import bascule_ddl_torch
bascule_ddl_torch.register()
print("imported")
dist.init_process_group("ddl", store=dist.HashStore(), rank=0, world_size=1)
print("made")
"""


def test_what_goes_wrong_at_import_is_raised_when_a_group_is_made(command: Callable[..., object]) -> None:
    code = CHANGED.format(change="dist.Backend.register_backend = lambda name, creator: its(name, creator, True)")
    done = command([sys.executable, "-c", code], timeout=60, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 1
    assert "imported" in done.stdout, done.stdout
    assert "TypeError: " in done.stdout, done.stdout  # the cause
    assert "RuntimeError: the backend ddl could not be loaded at `import torch`: " in done.stdout


def test_where_nothing_can_be_registered_a_warning_says_why(command: Callable[..., object]) -> None:
    code = CHANGED.format(change="dist.Backend.register_backend = None")
    for options in ([], ["-W", "error"]):
        done = command([sys.executable, *options, "-c", code], timeout=60, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        assert done.returncode == 1
        assert "imported" in done.stdout, done.stdout
        said = (
            "RuntimeWarning: torch.distributed does not take the backend ddl: TypeError: 'NoneType' object is not call"
        )
        assert (said in done.stdout) == (not options), done.stdout


@pytest.mark.parametrize("mpirun", [False, True])
def test_another_rendezvous_than_expected_stands_only_in_mpiruns_way(
    command: Callable[..., object], mpirun: bool
) -> None:
    code = CHANGED.format(change="sys.modules['torch.distributed.rendezvous']._rendezvous_handlers.clear()")
    variables = {"PMI_RANK": "0"} if mpirun else {}
    done = command([sys.executable, "-c", code], timeout=60, TORCH_DEVICE_BACKEND_AUTOLOAD="0", **variables)
    assert "imported" in done.stdout, done.stdout
    assert ("which therefore does not know what mpirun knows (KeyError: 'env')" in done.stdout) == mpirun, done.stdout
    assert done.returncode == 0, done.stdout
    assert "made" in done.stdout


def test_a_missing_library_is_raised_when_a_group_is_made_and_not_before(command: Callable[..., object]) -> None:
    code = f"import torch; print('imported'); {SCRIPT}"
    done = command([sys.executable, "-c", code], timeout=60, DDL_LIBRARY="/nowhere/libddl.so", **ALONE)
    assert done.returncode == 1
    assert done.stdout.startswith("imported")
    assert "LibraryError: libddl.so was not found (/nowhere/libddl.so)" in done.stdout


def test_another_place_than_mpis_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setattr(ddl, "rank", lambda: 1, raising=False)
    monkeypatch.setattr(ddl, "size", lambda: 4, raising=False)
    monkeypatch.setattr(ddl, "is_initialized", lambda: True, raising=False)
    store = SimpleNamespace()
    job.enter(store, 1, 4)
    with pytest.raises(LaunchError, match=r"rank 1 of 5, but MPI knows this process as rank 1 of 4"):
        job.enter(store, 1, 5)
    job.leave()


@pytest.mark.parametrize(
    ("environment", "odd"),
    [
        ({"WORLD_SIZE": "3", "OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"WORLD_SIZE": "3", "PMI_SIZE": "4"}, True),
        ({"WORLD_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "2"}, False),
        ({"WORLD_SIZE": "", "OMPI_COMM_WORLD_SIZE": "2"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, False),
        ({"WORLD_SIZE": "8", "OMPI_COMM_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a"}, False),
        ({"WORLD_SIZE": "3"}, False),
    ],
)
def test_another_size_than_mpis_is_noticed_before_ranks_are_waited_for(environment: dict[str, str], odd: bool) -> None:
    assert (rendezvous.odd_size(environment) is not None) == odd


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "turned", "said"),
    [
        (3, False, "WORLD_SIZE is 3, but MPI started 2 processes"),
        (1, False, "was asked for rank 0 of 1, but MPI knows this process as rank 0 of 2"),
        (2, True, "was asked for rank 0 of 2, but MPI knows this process as rank 1 of 2"),
    ],
)
def test_numbers_that_are_not_mpis_end_in_words(
    ranks: Callable[..., object], tmp_path: Path, world: int, turned: bool, said: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import datetime, os, torch.distributed as dist\n"
        "rank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"
        f"os.environ['RANK'] = str({'1 - rank' if turned else 'rank'})\n"
        "dist.init_process_group('ddl', timeout=datetime.timedelta(seconds=5))\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    done = ranks(2, script, timeout=100, WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert done.returncode != 0
    assert said in done.stdout, done.stdout


def test_a_timeout_is_the_scripts_and_no_longer_than_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[float] = []
    group = SimpleNamespace(_comm=SimpleNamespace(set_timeout=said.append))
    for seconds in (1800, 5):
        for longest in ("", "60"):
            monkeypatch.setenv("DDL_TIMEOUT", longest)
            process_group.ProcessGroup.set_timeout(group, timedelta(seconds=seconds))  # type: ignore[arg-type]
    assert said == [1800, 60, 5, 5]


@pytest.mark.parametrize(
    ("seconds", "longest", "seen"),
    [
        (5, None, "5.0"),
        (1800, None, "1800.0"),
        (5, "60", "5.0"),
        (1800, "60", "60"),
        (5, "", "5.0"),
        (1e12, None, "1000000000.0"),
        (5, "x", "x"),  # libddl says what is wrong with it
        (0, None, None),  # set_timeout says so
    ],
)
def test_joining_waits_no_longer_than_the_timeout(
    monkeypatch: pytest.MonkeyPatch, seconds: float, longest: str | None, seen: str | None
) -> None:
    found: list[str | None] = []
    monkeypatch.setattr(ddl, "is_initialized", lambda: False)
    monkeypatch.setattr(ddl, "init", lambda **_: found.append(os.environ.get("DDL_TIMEOUT")))
    monkeypatch.setattr(job, "_joined", False)
    monkeypatch.delenv("DDL_TIMEOUT", raising=False)
    if longest is not None:
        monkeypatch.setenv("DDL_TIMEOUT", longest)
    job.join(SimpleNamespace(), 0, 2, timedelta(seconds=seconds))  # type: ignore[arg-type]
    assert (found, os.environ.get("DDL_TIMEOUT")) == ([seen], longest)


def test_a_rank_that_never_joins_is_missed_after_the_timeout(command: Callable[..., object], tmp_path: Path) -> None:
    code = f"""
import datetime, torch.distributed as dist
store = dist.FileStore({str(tmp_path / "store")!r}, 2)
dist.init_process_group('ddl', store=store, rank=0, world_size=2, timeout=datetime.timedelta(seconds=1))
"""
    done = command([sys.executable, "-c", code], timeout=60)
    said = "RankTimeoutError: ddl_init: rank 0 has waited 1 s for rank 1: .*, and so does the timeout of init_process"
    assert re.search(said, done.stdout), done.stdout


def test_the_rendezvous_of_others_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    rendezvous.install()
    installed = handlers["env"]
    rendezvous.install()
    assert handlers["env"] is installed
    with pytest.raises(ValueError, match="environment variable RANK expected, but not set"):
        next(installed("env://"))


def test_ranks_of_several_hosts_find_the_store_by_addresses(ranks: Callable[..., object], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import socket, sys, torch, ddl, torch.distributed as dist\n"
        "from ddl.launch import reach\n"
        "ddl.num_hosts = lambda: 2\n"
        "socket.gethostname = lambda: 'no-such-host.invalid'\n"
        "reach.outer_addresses = lambda: sys.argv[1:]\n"
        "dist.init_process_group('ddl')\n"
        "t = torch.ones(3); dist.all_reduce(t); print('sum', t.sum().item())\n"
    )
    # Rank 0's store listens at all addresses of the loopback; 0.0.0.1 is nobody's.
    done = ranks(2, script, "0.0.0.1", "127.0.0.5", timeout=60)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("sum 6.0") == 2
    done = ranks(2, script, "0.0.0.1", timeout=60)
    assert done.returncode != 0
    assert "LaunchError: rank 1 on host no-such-host.invalid cannot reach the store of rank 0, port " in done.stdout


def test_a_store_is_described_by_the_hosts_there_is_space_for() -> None:
    assert rendezvous.described(80, ["10.0.0.1", "h0"]) == b"80 10.0.0.1 h0"
    many = [f"10.0.0.{number}" for number in range(256)]
    text = rendezvous.described(80, many).decode()
    assert 900 < len(text) <= 1024
    assert text.split() == ["80", *many[: len(text.split()) - 1]]
    assert rendezvous.own_hosts(1) == ["127.0.0.1"]
    assert rendezvous.own_hosts(2)[-1] == socket.gethostname()


def test_new_group_needs_a_default_group_of_the_same_backend() -> None:
    options = SimpleNamespace(global_ranks_in_group=[0], group_id="1", store=None, timeout=timedelta(seconds=1))
    with pytest.raises(ddl.StateError, match="the default group is not of it"):
        groups.create(options)


@pytest.mark.parametrize("backend", ["ddl", "cpu:ddl,cuda:gloo"])
def test_one_process_alone_needs_no_launcher(command: Callable[..., object], backend: str) -> None:
    code = f"""
import torch, torch.distributed as dist
dist.init_process_group({backend!r})
for group in (dist.group.WORLD, dist.new_group([0])):
    t = torch.ones(3)
    dist.all_reduce(t, group=group)
    dist.barrier(group=group)
    print(type(group).__module__, t.sum().item())
"""
    done = command([sys.executable, "-c", code], timeout=60, **ALONE)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ddl.torch.process_group 3.0") == 2, done.stdout
