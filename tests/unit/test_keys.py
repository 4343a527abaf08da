"""Keys of the engines' servers: where they come from, and who is let in."""

from __future__ import annotations

import asyncio

import pytest

from megarl.cluster.keys import NO_KEYS, Keys
from megarl.errors import UserMistake
from megarl.rollout.embedded.auth import RequireKeys
from megarl.rollout.fleet import EngineRecord

BOTH, ONE = Keys("sesame", "open"), Keys("sesame")


def test_keys_are_new_each_time_or_those_of_the_environment():
    made = {Keys.generate() for _ in range(3)}
    assert len(made) == 3 and all(len(keys.api) == len(keys.admin) == 32 and keys.api != keys.admin for keys in made)
    assert Keys.from_env(BOTH.environment()) == BOTH and Keys.from_env(ONE.environment()) == ONE
    assert Keys.from_env({"MEGARL_API_KEY": ""}) == NO_KEYS and not NO_KEYS and ONE
    assert Keys.from_text(BOTH.to_text()) == BOTH


@pytest.mark.parametrize("name, value, words", [
    ("MEGARL_API_KEY", "two words", "MEGARL_API_KEY: a key is printable ASCII without spaces; for example"),
    ("MEGARL_ADMIN_KEY", "schlüssel", "MEGARL_ADMIN_KEY: a key is printable"),
    ("MEGARL_ADMIN_KEY", "alone", "MEGARL_ADMIN_KEY: without an API key everybody may sample; set MEGARL_API_KEY too")])
def test_keys_that_cannot_be(name, value, words):
    with pytest.raises(UserMistake) as caught:
        Keys.from_env({name: value})
    assert caught.value.line().startswith(words)


def test_nothing_prints_a_key():
    record = EngineRecord("0.0", 1, "http://h:1", "up", keys=BOTH)
    for text in (repr(BOTH), str(BOTH), repr(record), record.describe(), record.to_json()):
        assert "sesame" not in text and "open" not in text


def let_in(keys: Keys, path: str, header: str | None) -> bool:
    """Whether a request comes through."""
    told = []

    async def app(scope, receive, send):
        told.append(200)

    async def send(message):
        told.extend([message["status"]] if "status" in message else [])

    headers = [] if header is None else [(b"authorization", header.encode("latin-1"))]
    asyncio.run(RequireKeys(app, keys)({"type": "http", "path": path, "headers": headers}, None, send))
    assert told in ([200], [401])
    return told == [200]


@pytest.mark.parametrize("keys, path, header, expected", [
    (NO_KEYS, "/generate", None, True), (NO_KEYS, "/begin_weight_update", "Bearer whatever", True),
    (BOTH, "/health", None, True), (BOTH, "/health_generate", None, True), (BOTH, "/metrics", None, True),
    (BOTH, "/generate", None, False), (BOTH, "/generate", "Bearer sesame", True),
    (BOTH, "/generate", "bearer sesame", True), (BOTH, "/generate", "Basic sesame", False),
    (BOTH, "/generate", "Bearer open", False), (BOTH, "/generate", "Bearer sesam", False),
    (BOTH, "/generate", "sesame", False), (BOTH, "/generate", "Bearer s\xe9same", False),
    (BOTH, "/v1/loads", "Bearer sesame", True),
    (BOTH, "/begin_weight_update", "Bearer sesame", False), (BOTH, "/begin_weight_update", "Bearer open", True),
    (BOTH, "/abort_request", "Bearer sesame", False), (BOTH, "/unheard_of", "Bearer sesame", False),
    (ONE, "/begin_weight_update", "Bearer sesame", True), (ONE, "/begin_weight_update", None, False)])
def test_the_embedded_server_lets_in_whom_sglang_would(keys, path, header, expected):
    assert let_in(keys, path, header) is expected
