"""Which of its addresses a host gives to others, and a barrier that names who is missing."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megarl.cluster import store
from megarl.errors import MachineFault


@pytest.mark.parametrize("master, one_host, expected", [
    ("10.0.0.7", True, "10.0.0.5"), ("10.0.0.7", False, "10.0.0.5"), ("self", True, "127.0.1.1"),
    ("self", False, "10.9.0.5"), ("self6", False, "10.9.0.5"), ("nobody", False, "127.0.0.1")])
def test_own_address(master: str, one_host: bool, expected: str, monkeypatch: pytest.MonkeyPatch):
    routes = {"10.0.0.7": "10.0.0.5", "self": "127.0.1.1", "self6": "::1", "192.0.2.1": "10.9.0.5"}

    def interface(towards: str) -> str:
        if towards not in routes:
            raise OSError("name or service not known")
        return routes[towards]

    monkeypatch.setattr(store, "_interface", interface)
    assert store.own_address(master, one_host) == expected


def test_this_host():
    assert store.own_address("127.0.0.1") == "127.0.0.1"


def test_a_muster_names_who_is_missing():
    """All come, twice; then two of four do not."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                           timeout=datetime.timedelta(seconds=20))
    musters = [store.Muster(server, rank, 4, "the weight update") for rank in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(2):
            list(threads.map(lambda muster: muster(10.0), musters))
        late = [threads.submit(musters[rank], 0.3) for rank in (0, 2)]
        for one in late:
            with pytest.raises(MachineFault, match="^trainers 1, 3 did not come to the weight update within 0.3 s$"):
                one.result()
