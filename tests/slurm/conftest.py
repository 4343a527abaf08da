"""One Slurm of four nodes for the tests of this folder; elsewhere one skip that says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, cluster, why_not


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """n1 and n2 become trainers, n3 has the rollout rank, n4 is the spare."""
    if reason := why_not():
        pytest.skip(reason)
    with cluster(tmp_path_factory.mktemp("slurm"), nodes=4) as made:
        yield made


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model and its prompts."""
    from good_config import write_files

    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    return folder
