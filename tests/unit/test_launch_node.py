"""How many ranks the launcher starts on a node."""

from __future__ import annotations

import pytest

from megarl.config.schema import ClusterConfig
from megarl.errors import UserMistake
from megarl.launch import Node


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch):
    """`node(trainers, rollouts, VARIABLE=value, ...)` -> the ranks of this node."""
    def make(trainers: int, rollouts: int, **environ: str) -> int:
        for name in ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"MASTER_ADDR": "localhost", "NODE_RANK": "1", **environ}.items():
            monkeypatch.setenv(name, value)
        return Node.from_env(ClusterConfig(trainers=trainers, rollouts=rollouts)).processes

    return make


@pytest.mark.parametrize("environ, ranks", [
    ({"NNODES": "2"}, 10), ({"NNODES": "3", "NPROC_PER_NODE": "8,8,4"}, 8),
    ({"NNODES": "3", "NPROC_PER_NODE": "8,8,4", "NODE_RANK": "2"}, 4), ({"NNODES": "3", "NPROC_PER_NODE": "6"}, 6)])
def test_ranks_of_a_node(node, environ: dict[str, str], ranks: int):
    assert node(16, 4, **environ) == ranks


@pytest.mark.parametrize("environ, told", [
    ({"NNODES": "3"}, "3 nodes do not divide the 20 ranks"),
    ({"NNODES": "3", "NPROC_PER_NODE": "8,8"}, "8,8 is not 20 ranks .* on 3 nodes"),
    ({"NNODES": "3", "NPROC_PER_NODE": "8,8,8"}, "8,8,8 is not 20 ranks"),
    ({"NNODES": "3", "NPROC_PER_NODE": "8,8,x"}, "NPROC_PER_NODE: 'x' is not a whole number")])
def test_mistakes(node, environ: dict[str, str], told: str):
    with pytest.raises(UserMistake, match=told):
        node(16, 4, **environ)
