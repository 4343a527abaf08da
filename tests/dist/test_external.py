"""Engines that others started: whose weights they hold, and what is done when that is not known."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from aiohttp import web
from rollout_parts import GENERATION, make_config, new_store
from scripted_engine import ScriptedEngine, Serving
from supervised import until

from megarl.cluster.keys import NO_KEYS, Keys
from megarl.errors import UserMistake
from megarl.rollout import external
from megarl.rollout.external import ExternalEngines, address_towards
from megarl.rollout.fleet import EngineRecord, Fleet
from megarl.rollout.protocol import format_version


@contextmanager
def looked_after(*engines: ScriptedEngine, keys: Keys = NO_KEYS, **sections: Any) -> Iterator[tuple[Fleet, list[Any]]]:
    """A fleet of these engines, and their servers."""
    with ExitStack() as stack:
        served = [stack.enter_context(Serving(engine)) for engine in engines]
        config = make_config(rollout={"urls": [one.url for one in served], **sections.pop("rollout", {})},
                             cluster={"rollouts": 0, "lease_timeout_s": 2.0, "start_timeout_s": 30.0}, **sections)
        store = new_store()
        fleet = Fleet.from_config(config, store, keys)
        stack.enter_context(ExternalEngines(config, store, GENERATION, keys))
        yield fleet, served


def found(fleet: Fleet, condition: Callable[[EngineRecord], bool], what: str) -> EngineRecord:
    """The first engine, once its record fulfils the condition."""
    return until(lambda: (records := fleet.records()) and condition(records[0]) and records[0], what, 20.0)


def publish(number: int, engine: ScriptedEngine, fleet: Fleet) -> None:
    """As a publish names the weights; returns after two probes that saw it."""
    engine.version = format_version(GENERATION, number)
    readings = until(lambda: fleet.records()[0].load, "no reading").reading
    until(lambda: fleet.records()[0].load.reading > readings + 2, "no reading")


def test_an_engine_is_claimed_and_its_name_says_whether_it_still_is_the_same(monkeypatch):
    monkeypatch.setattr(external, "PROBE_S", 0.05)
    engine = ScriptedEngine("default")
    with looked_after(engine) as (fleet, _):
        (first,) = fleet.wait_ready(20)
        assert first.key == ("url.0", 1) and engine.version == f"own-url.0-1-{GENERATION}"
        assert engine.aborted == ["all"] and engine.control_calls == ["end_weight_update", "continue_generation"]
        fleet.mark_synced("v", [first])
        for number in (0, 1, 5):
            publish(number, engine, fleet)
            assert fleet.synced_engines() == [first]
        incarnation = 1
        for other in ("default", format_version(GENERATION, 4), format_version("another.0.life", 9), "own-url.0-1-x"):
            incarnation += 1
            engine.version = other  # started again, or in somebody else's hands
            assert found(fleet, lambda r: r.incarnation == incarnation and r.state == "up",  # noqa: B023
                         f"{other} was taken for ours").url == first.url
            assert engine.version == f"own-url.0-{incarnation}-{GENERATION}" and fleet.synced_engines() == []
            publish(5, engine, fleet)
            assert fleet.records()[0].incarnation == incarnation


def test_a_connection_that_comes_back_is_the_same_engine(monkeypatch):
    monkeypatch.setattr(external, "PROBE_S", 0.05)
    engine = ScriptedEngine("default")
    with looked_after(engine) as (fleet, (served,)):
        (first,) = fleet.wait_ready(20)
        engine.version = format_version(GENERATION, 3)
        served.close()
        assert "Cannot connect" in found(fleet, lambda r: r.state == "down", "it is still up").detail
        with Serving(engine, int(served.url.rpartition(":")[2])):
            again = found(fleet, lambda r: r.state == "up", "it did not come back")
            assert again.key == first.key and engine.version == format_version(GENERATION, 3)


def test_a_silent_one_is_left_out_after_the_lease(monkeypatch):
    monkeypatch.setattr(external, "PROBE_TIMEOUT_S", 0.3)

    class Hanging(ScriptedEngine):
        hangs = False

        async def model_info(self, request: web.Request) -> web.Response:
            import asyncio

            await asyncio.sleep(3600 if self.hangs else 0)
            return await super().model_info(request)

    engine = Hanging("default")
    with looked_after(engine) as (fleet, _):
        (first,) = fleet.wait_ready(20)
        engine.hangs = True
        assert "silent for 2 s" in found(fleet, lambda r: r.state == "down", "it is still up").detail
        engine.hangs = False
        assert found(fleet, lambda r: r.state == "up", "it did not come back").key == first.key


def test_a_condemned_one_is_left_out_until_it_is_in_a_known_state(monkeypatch, caplog):
    monkeypatch.setattr(external, "PROBE_S", 0.05)
    engine = ScriptedEngine("default")
    with looked_after(engine) as (fleet, _), caplog.at_level(logging.WARNING):
        (first,) = fleet.wait_ready(20)
        fleet.condemn(first, "its update was cut short")
        assert "condemned: its update" in found(fleet, lambda r: r.state == "down", "it is still up").detail
        second = found(fleet, lambda r: r.state == "up", "it did not come back")
        assert second.key == ("url.0", 2) and engine.control_calls == ["end_weight_update", "continue_generation"] * 2
        assert "not megarl's to end" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_engines_that_nobody_looks_after_count_as_gone(monkeypatch):
    with looked_after(ScriptedEngine("default")) as (fleet, _):
        fleet.wait_ready(20)

        async def broken(self):
            raise ValueError("a bug")

        monkeypatch.setattr(external._Line, "_look", broken)
        until(lambda: not fleet.engines(), "still there", 20.0)
        assert "trainer 0, which looks after it, is silent" in fleet.describe_missing([])


class _Keyed(ScriptedEngine):
    """Takes control calls with the admin key alone."""

    async def set_version(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer open":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await super().set_version(request)


@pytest.mark.parametrize("engine, sections, words", [
    (_Keyed("v"), {}, "refuses the key: .*status 401.*\n  remedy: set MEGARL_API_KEY and MEGARL_ADMIN_KEY"),
    (ScriptedEngine("v"), {"rollout": {"engine": "sglang"}}, "is embedded, but rollout.engine is sglang")])
def test_one_that_will_not_do_is_the_users_mistake(engine, sections, words):
    with looked_after(engine, **sections) as (fleet, _), pytest.raises(UserMistake, match=words):
        fleet.wait_ready(20)


def test_sizes_and_keys_of_sglang():
    class Large(_Keyed):
        size = 4

    for tp_size, words in ((4, None), (2, "has 4 ranks, but sglang.tp_size x pp_size is 2")):
        with looked_after(Large("v"), keys=Keys("sesame", "open"), rollout={"engine": "sglang"},
                          sglang={"tp_size": tp_size}) as (fleet, _):
            if words is None:
                assert fleet.wait_ready(20)[0].keys == Keys("sesame", "open")
            else:
                with pytest.raises(UserMistake, match=words):
                    fleet.wait_ready(20)


def test_the_address_that_outside_engines_reach(monkeypatch):
    routes = {"node7": "10.0.0.5", "127.0.0.1": "127.0.0.1", "::1": "::1"}
    monkeypatch.setattr(external, "own_address", lambda host: routes[host])
    assert address_towards(["http://127.0.0.1:1", "http://node7:1"], "127.0.0.1") == "10.0.0.5"
    assert address_towards(["http://127.0.0.1:1", "http://[::1]:2"], "127.0.0.1") == "127.0.0.1"
    assert address_towards(["http://node7:1"], "192.168.0.2") == "192.168.0.2"
    assert address_towards([], "127.0.0.1") == "127.0.0.1"


def test_nobody_there_is_told_by_name():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        config = make_config(rollout={"urls": [url]}, cluster={"rollouts": 0})
        store = new_store()
        with ExternalEngines(config, store, GENERATION), pytest.raises(
                Exception, match="1 of 1 engines are not up after 2 s: engine url.0: down .*Cannot connect"):
            Fleet.from_config(config, store).wait_ready(2.0)
