"""Whole runs through a few faults of each kind; tests/bench/faults.py makes many, at random times."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from faults import FAULTS, Run, check, cut_off, external_engines, make_faults, outside_run, tree
from interfere import OTHERWISE, SPOILED, Proxy, hosts, no_namespaces
from supervised import processes_with, until

from megarl.errors import EXIT_FAULT
from megarl.rollout.process import free_port

MANY = 100_000  # steps: a run is ended when its faults are over


def go_on(run: Run, steps: int = 3) -> None:
    """So many more steps come."""
    goal = len(run.metrics()) + steps
    until(lambda: run.ended or len(run.metrics()) >= goal, "no step after the last fault", 60.0)
    assert not run.ended, run.told()[-3000:]


def test_engines_killed_at_work_in_updates_and_at_their_start_and_hanging_ones(tmp_path: Path):
    with Run(tmp_path, tree(tmp_path, MANY, seed=1)) as run:
        made = make_faults(run, list(FAULTS), seed=1, engines=2)
        go_on(run)
        run.stop()
        shown, told, last = check(run), run.told(), run.metrics()[-1]
    assert shown.twice == 0 and shown.sums["rollout/dropped_groups"] == 0
    assert shown.sums["rollout/retries"] > 0 and any("failed/" in name for name in shown.sums)
    assert last["fleet/restarts"] >= len(made) + 1 and last["fleet/engines"] == last["sync/engines"] == 2
    assert "was killed by SIGKILL" in told and "has been silent for 2 s" in told
    assert not processes_with(str(tmp_path / "model")), "a run left engines behind"


def test_answers_that_are_garbage(tmp_path: Path):
    ports = [free_port("127.0.0.1") for _ in range(2)]
    with ExitStack() as stack:
        stack.enter_context(external_engines(tmp_path, ports))
        proxies = [stack.enter_context(Proxy(f"http://127.0.0.1:{port}", seed, 0.4))
                   for seed, port in enumerate(ports)]
        run = stack.enter_context(outside_run(tmp_path, MANY, 2, 1, [proxy.url for proxy in proxies]))
        done: Counter[str] = Counter()
        deadline = time.monotonic() + 90
        while set(done) != {*SPOILED, *OTHERWISE}:
            assert not run.ended and time.monotonic() < deadline, (done, run.told()[-3000:])
            time.sleep(0.2)
            done = proxies[0].done + proxies[1].done
        go_on(run, 2)
        run.stop()
        shown = check(run)
    assert shown.twice == 0
    reasons = {name.rpartition("/")[2] for name, count in shown.sums.items() if "/failed/" in name and count}
    assert reasons >= {"bad_answer", "wrong_version", "failed", "busy", "lost", "timeout"}, reasons
    assert shown.sums["rollout/retries"] >= 0.9 * sum(count for name, count in shown.sums.items() if "failed/" in name)


@pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces())
def test_hosts_that_are_cut_off(tmp_path: Path):
    with ExitStack() as stack:
        places = stack.enter_context(hosts(2, tmp_path))
        for place in places:
            stack.enter_context(external_engines(tmp_path, [31000], place.prefix, place.address))
        run = stack.enter_context(outside_run(tmp_path, MANY, 3, 1, [f"http://{one.address}:31000" for one in places]))
        rng = random.Random(3)
        for place in places:
            cut_off(run, place, rng)
        go_on(run)
        run.stop()
        shown = check(run)
    assert shown.twice == 0


def test_a_run_without_any_engine_ends_in_time_and_says_why(tmp_path: Path):
    """The supervisor is stopped, so nothing starts the engine again."""
    config = tree(tmp_path, MANY, seed=4, engines=1, no_engine_timeout_s=4.0, retries=1)
    config["cluster"]["lease_timeout_s"] = 30.0
    with Run(tmp_path, config) as run:
        until(lambda: run.ended or len(run.metrics()) > 1, "no first step", 120.0)
        supervisor, (engine,) = run.process("RANK=1"), run.engines()
        os.kill(supervisor, signal.SIGSTOP)
        engine.signal(signal.SIGKILL)
        begun = time.monotonic()
        until((run.dir / "exit.json").exists, "nobody gave up", 30.0)
        print(f"given up {time.monotonic() - begun:.1f} s after its last engine")
        os.kill(supervisor, signal.SIGCONT)  # else the launcher waits for it
        assert run.wait(60.0) == EXIT_FAULT
        assert "no engine" in run.told() and check(run).twice == 0
