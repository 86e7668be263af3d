"""Who this process is among those of a job, by the environment of each launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from lms.ranks import own_file, rank_of, sharing


@pytest.mark.parametrize(
    ("environ", "rank", "ranks"),
    [
        ({}, None, 1),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, None, 1),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 3, 2),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 1, 2),
        ({"PMI_RANK": "1", "PMI_SIZE": "8", "MPI_LOCALNRANKS": "4"}, 1, 4),
        ({"RANK": "", "WORLD_SIZE": "many", "LOCAL_WORLD_SIZE": "0"}, None, 1),
    ],
)
def test_a_launchers_variables_say_which_rank_it_is_and_how_many_share_the_host(
    environ: dict[str, str], rank: int | None, ranks: int
) -> None:
    assert rank_of(environ) == rank
    assert sharing(environ) == ranks


def test_each_rank_has_a_file_of_its_own() -> None:
    names = [str(own_file(Path("out/step.json"), rank)) for rank in (None, 0, 1, 12)]
    assert names == ["out/step.json", "out/step.json", "out/step.rank1.json", "out/step.rank12.json"]
