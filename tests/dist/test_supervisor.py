"""Supervisors keep engines alive, tell failures, and leave nothing behind; engines here are scripted."""

import json
import os
import re
import signal
import socket
import stat
import time
import urllib.request
from pathlib import Path

import pytest
from rollout_parts import VERSION, make_config, new_store
from scripted_engine import ScriptedEngine, Serving
from supervised import Supervised, processes_with, until

from megarl.cluster.keys import Keys
from megarl.errors import MachineFault, UserMistake
from megarl.rollout.fleet import request_stop
from megarl.rollout.process import engine_command


def _stats(record):
    with urllib.request.urlopen(f"{record.url}/stats", timeout=10) as answer:
        return json.load(answer)


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_engine_comes_back_under_a_new_incarnation(tmp_path):
    seen = []
    with Supervised(tmp_path, rollouts=2, engines=2) as world:
        records = world.fleet.wait_ready(60, lambda up, expected: seen.append((up, expected)))
        assert [record.id for record in records] == ["0.0", "0.1", "1.0", "1.1"]
        assert {record.incarnation for record in records} == {1} and len({record.url for record in records}) == 4
        assert seen[-1] == (4, 4)
        world.fleet.mark_synced(VERSION, records)
        stats = _stats(records[1])
        inherited = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "MEGARL_RUN_DIR",
                     "TORCHELASTIC_USE_AGENT_STORE"} & set(stats["env"])
        assert not inherited and stats["env"]["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"

        os.kill(stats["pid"], signal.SIGKILL)
        until(lambda: len(world.fleet.engines()) == 3, "the dead engine is still registered")
        back = until(lambda: [r for r in world.fleet.engines() if r.key == ("0.1", 2)], "it did not come back")
        assert [record.id for record in world.fleet.synced_engines()] == ["0.0", "1.0", "1.1"]
        world.fleet.mark_synced(VERSION, world.fleet.engines())
        assert len(world.fleet.synced_engines()) == 4 and world.starts("0.1") == 2

        world.fleet.condemn(back[0], "its update was cut short")
        until(lambda: [r for r in world.fleet.engines() if r.key == ("0.1", 3)], "a condemned engine was kept")
        assert world.starts("0.0") == world.starts("1.0") == 1
        request_stop(world.store, "done")
        assert world.outcome(0) == world.outcome(1) == {"error": None}
        assert {record.state for record in world.fleet.records()} == {"stopped"}


def test_ctrl_c_is_an_interrupt_not_a_fault(tmp_path):
    with Supervised(tmp_path) as world:
        world.fleet.wait_ready(60)
        os.kill(world.processes[0].pid, signal.SIGINT)
        assert world.outcome()["error"] == "KeyboardInterrupt"
        assert not processes_with(str(tmp_path))


def test_sigterm_leaves_no_process_not_even_a_stubborn_one(tmp_path):
    with Supervised(tmp_path, options=["--stubborn"]) as world:
        (record,) = world.fleet.wait_ready(60)
        pids = [_stats(record)["pid"], int(world.log().split("child ")[1].split()[0])]
        assert all(_alive(pid) for pid in pids)
        world.processes[0].terminate()
        outcome = world.outcome()
        assert outcome["error"] == "Ended" and "SIGTERM" in outcome["message"]
        assert not processes_with(str(tmp_path))


def test_a_killed_supervisor_takes_its_engine_along(tmp_path):
    with Supervised(tmp_path) as world:
        (record,) = world.fleet.wait_ready(60)
        pid = _stats(record)["pid"]
        world.processes[0].kill()
        until(lambda: pid not in processes_with(str(tmp_path)), "the engine outlived its supervisor")


def test_an_engines_mistake_is_the_runs_mistake(tmp_path):
    with Supervised(tmp_path, engines=2, options=["--exit", "64"]) as world:
        with pytest.raises(UserMistake, match="^config.json: no such model\n  remedy: name one that exists$"):
            world.fleet.wait_ready(60)
        assert world.outcome() == {"error": "UserMistake",
                                   "message": "config.json: no such model\n  remedy: name one that exists"}
        assert world.starts() == 1


def test_an_engine_that_never_starts_is_given_up(tmp_path):
    with Supervised(tmp_path, options=["--exit", "3"]) as world:
        with pytest.raises(MachineFault, match="ended with status 3.*engine-0.0.log ends:   remedy: name one"):
            world.fleet.wait_ready(60)
        assert world.outcome()["error"] == "MachineFault" and world.starts() == 2


@pytest.mark.parametrize("status", [1, 64])
def test_a_port_taken_since_it_was_picked_costs_one_start(tmp_path, status):
    with Serving(ScriptedEngine("own-0.0-1-1")) as other:  # also answers /health: must not be taken for the engine
        port = int(other.url.rpartition(":")[2])
        with Supervised(tmp_path, ports=[port], options=["--clash-status", str(status)]) as world:
            (record,) = world.fleet.wait_ready(60)
            assert record.url != other.url and record.incarnation == 2
            assert f"error: port {port} is taken" in world.log()


def test_a_hanging_engine_is_replaced(tmp_path):
    with Supervised(tmp_path, cluster={"lease_timeout_s": 2.0}) as world:
        (record,) = world.fleet.wait_ready(60)
        os.kill(_stats(record)["pid"], signal.SIGSTOP)
        until(lambda: [r for r in world.fleet.engines() if r.incarnation == 2], "it was not replaced")


def test_engines_end_with_their_trainers(tmp_path):
    with Supervised(tmp_path, cluster={"lease_timeout_s": 1.5}) as world:
        world.fleet.wait_ready(60)
        world.heartbeat.close()
        outcome = world.outcome()
        assert outcome["error"] == "MachineFault" and "no sign of life from trainer 0 for 2 s" in outcome["message"]
        assert not processes_with(str(tmp_path))


def test_trainers_that_never_begin_are_not_waited_for_for_ever(tmp_path):
    with Supervised(tmp_path, beat=False, cluster={"start_timeout_s": 1.0}) as world:
        assert "no sign of life from trainer 0 for 1 s" in world.outcome()["message"]


def test_engines_end_with_the_store(tmp_path):
    with Supervised(tmp_path, cluster={"lease_timeout_s": 2.0}) as world:
        world.fleet.wait_ready(60)
        world.heartbeat.close()
        address, port = world.store.host, world.store.port
        world.store = world.fleet = world.heartbeat = None  # ends the store's server
        until(lambda: _refuses(address, port), "the store is still there")
        assert world.outcome()["error"] == "MachineFault"
        world.store = new_store()


def _refuses(host, port):
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) != 0


def test_ranks_that_are_missing_are_named(tmp_path):
    with Supervised(tmp_path, rollouts=1, engines=1) as world:
        world.fleet.wait_ready(60)
        wider = type(world.fleet)(world.store, 2, 2, 30.0)
        begun = time.monotonic()
        with pytest.raises(MachineFault, match="3 of 4 engines are not up after 0 s: engine 0.1: rollout rank 0 has "
                                               "not reported it; engine 1.0: rollout rank 1 has not"):
            wider.wait_ready(0.3)
        assert time.monotonic() - begun < 15


def test_command_of_the_embedded_engine():
    embedded = engine_command(make_config("/m"), 0, 0, "127.0.0.1", 5, "own-1")
    assert embedded[1:] == ["-m", "megarl.rollout.embedded", "--model-path", "/m", "--host", "127.0.0.1", "--port",
                            "5", "--dtype", "float32", "--weight-version", "own-1", "--slots", "64",
                            "--update-timeout", "120.0"]


SPREAD = {"sglang": {"tp_size": 2}, "rollout": {"engine": "sglang", "gpus_per_rank": 1, "start_attempts": 5}}


def _pids(world, log, count):
    """Process ids of an engine's part, one for each of its first `count` incarnations."""
    return until(lambda: (found := [int(pid) for pid in re.findall(r"^pid (\d+)$", world.log(log), re.MULTILINE)])
                 and len(found) >= count and found, f"{log} was not started {count} times")


def test_parts_of_an_engine_start_and_end_together(tmp_path):
    with Supervised(tmp_path, rollouts=4, options=["--tell-pid"], **SPREAD) as world:
        records = world.fleet.wait_ready(60)
        assert [record.key for record in records] == [("0.0", 1), ("2.0", 1)]
        commands = [world.log(name).splitlines()[0] for name in ("0.0", "0.0.node1", "2.0", "2.0.node1")]
        parts = [command.rpartition("--part=")[2] for command in commands]
        assert [part.partition("@")[0] for part in parts] == ["0/2", "1/2"] * 2
        assert parts[0].partition("@")[2] == parts[1].partition("@")[2] != parts[3].partition("@")[2]

        (first,), (second,) = _pids(world, "0.0", 1), _pids(world, "0.0.node1", 1)
        os.kill(second, signal.SIGKILL)  # the part without the server
        until(lambda: not world.fleet.engines() or world.fleet.engines()[0].id == "2.0", "an engine without a part")
        until(lambda: [r for r in world.fleet.engines() if r.key == ("0.0", 2)], "it did not come back")
        (_, again), (_, second) = _pids(world, "0.0", 2), _pids(world, "0.0.node1", 2)
        assert not _alive(first) and _alive(second)

        os.kill(again, signal.SIGKILL)
        until(lambda: [r for r in world.fleet.engines() if r.key == ("0.0", 3)], "it did not come back")
        until(lambda: not _alive(second), "a part outlived its engine")
        assert len(_pids(world, "0.0.node1", 3)) == 3
        assert world.starts("2.0") == world.starts("2.0.node1") == 1


def test_an_engine_whose_part_has_no_supervisor_waits_for_it(tmp_path):
    with Supervised(tmp_path, rollouts=2, options=["--tell-pid"], cluster={"lease_timeout_s": 2.0}, **SPREAD) as world:
        world.fleet.wait_ready(60)
        world.processes[1].kill()
        until(lambda: not world.fleet.engines(), "an engine without a part is still registered")
        until(lambda: world.fleet.records()[0].state == "down", "its process was kept")
        assert "rollout rank 1, which has a part of it, is silent" in world.fleet.records()[0].detail
        world.start_again(1)
        until(lambda: world.fleet.engines(), "it did not come back")
        assert world.fleet.engines()[0].incarnation == 2


def test_keys_reach_engines_and_nothing_that_others_can_read(tmp_path):
    keys = Keys("sesame-for-all", "open-for-few")
    with Supervised(tmp_path, keys=keys) as world:
        (record,) = world.fleet.wait_ready(60)
        assert record.keys == keys
        stats = _stats(record)
        assert stats["env"]["MEGARL_API_KEY"] == keys.api and stats["env"]["MEGARL_ADMIN_KEY"] == keys.admin
        until(lambda: world.fleet.records()[0].load is not None, "no load was published")
        text = world.log() + str(world.fleet.records()) + Path(f"/proc/{stats['pid']}/cmdline").read_text()
        assert keys.api not in text and keys.admin not in text
        assert stat.S_IMODE((tmp_path / "logs" / "engine-0.0.log").stat().st_mode) == 0o600
