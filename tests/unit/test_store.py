"""Which of its addresses a host gives to others, and a barrier that names who is missing."""

from __future__ import annotations

import pytest

from megarl.cluster import store


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
