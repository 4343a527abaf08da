"""Two supervised embedded engines, two leaders: the same samples whoever makes them, also when an engine is killed."""

import os
import signal

import numpy as np
import pytest
from models import save_hf_model
from rollout_parts import GENERATION, SEED, VERSION, NumberedPrompts, in_loop
from supervised import Supervised, listening, processes_with, until

from megarl.config.schema import SamplingConfig
from megarl.data.sample import sample_seed
from megarl.errors import MachineFault
from megarl.rollout.client import EngineClient
from megarl.rollout.dispatch import Dispatcher, Draws, wait_for_decision
from megarl.rollout.generate import Generator
from megarl.rollout.ledger import Announcements

GROUPS, SAMPLES, TOKENS = 16, 4, 120


class SamePrompts(NumberedPrompts):
    """The same prompts at every step."""

    def at(self, position):
        return super().at(position % GROUPS)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Engines with the weights VERSION (those of the directory, renamed), and a generator per leader."""
    folder = tmp_path_factory.mktemp("embedded")
    model = save_hf_model("qwen3_moe", folder / "model")
    rollout = {"samples_per_prompt": SAMPLES, "max_response_tokens": TOKENS, "slots": 8, "groups_in_flight": 6,
               "no_engine_timeout_s": 2.0, "retries": 20}  # a busy supervisor may notice a dead engine late
    with Supervised(folder, rollouts=2, options=None, model=str(model), need=GROUPS, rollout=rollout) as supervised:
        for record in _publish(supervised):
            info = in_loop(lambda session, url=record.url: EngineClient(url, session).model_info())
            assert info.weight_version == VERSION
        supervised.leaders = [
            Generator(supervised.config, SamePrompts(), _fleet(supervised), supervised.store, Draws(),
                      generation=GENERATION, leader_index=leader, leaders=2, vocab_size=99, decode=str)
            for leader in range(2)]
        supervised.dispatcher = Dispatcher(supervised.config, supervised.store, Draws())
        supervised.ear = Announcements(supervised.store)
        yield supervised
        for leader in supervised.leaders:
            leader.close()


def test_servers_listen_on_loopback_alone_where_the_job_is_on_one_host(world):
    ports = {int(record.url.rpartition(":")[2]) for record in world.fleet.engines()}
    pids = [pid for port in ports for pid in processes_with(f"--port\0{port}\0")]
    found = listening(pids)
    assert len(ports) == 2 and {port: found[port] for port in ports} == dict.fromkeys(ports, "127.0.0.1")
    assert set(found.values()) == {"127.0.0.1"}, found


def _fleet(world):
    return type(world.fleet)(world.store, 2, 1, world.config.cluster.lease_timeout_s)


def _publish(world):
    """What a publish leaves behind; the directory's weights are the current ones here."""
    records = world.fleet.wait_ready(240)
    for record in records:
        in_loop(lambda session, url=record.url: EngineClient(url, session).set_version(VERSION))
    world.fleet.mark_synced(VERSION, records)
    return records


def _collect(world, step, meanwhile=lambda: None):
    """Position -> group, over both leaders, of positions 0 .. GROUPS - 1; and the leaders' counts together."""
    def alive():
        for leader in world.leaders:
            leader.check()

    world.dispatcher.open(step, VERSION)
    meanwhile()
    world.dispatcher.decide(step, alive)
    decision = wait_for_decision(world.ear, alive)
    results = [leader.take(decision.numbers) for leader in world.leaders]
    groups = [group for result in results for group in result.groups]
    assert sorted(group.prompt.position for group in groups) == list(range(GROUPS))
    return {group.prompt.position: group for group in groups}, results[0].counts + results[1].counts


def _assert_same(one, other):
    for position in range(GROUPS):
        for a, b in zip(one[position].samples, other[position].samples, strict=True):
            assert a.response_ids.tolist() == b.response_ids.tolist()
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_samples_do_not_depend_on_who_makes_them_nor_on_a_killed_engine(world):
    first, counts = _collect(world, 0)
    assert counts["engine/0.0"] + counts["engine/1.0"] == GROUPS and min(counts["engine/0.0"], counts["engine/1.0"]) > 0
    for position, group in first.items():
        assert [(s.n, s.seed) for s in group.samples] == [(n, sample_seed(SEED, position, n)) for n in range(SAMPLES)]
        for sample in group.samples:
            assert sample.versions == [(VERSION, 0, len(sample.response_ids))]
            ended = sample.response_ids[-1] == 1  # the end of sequence
            assert sample.finish == ("stop" if ended else "length") and (ended or len(sample.response_ids) == TOKENS)
    assert len({tuple(s.response_ids) for group in first.values() for s in group.samples}) == GROUPS * SAMPLES

    pid = _pid_of(world, "1.0")

    def kill():
        until(lambda: all(leader._issuer._balancer._in_flight["1.0", 1] for leader in world.leaders), "no request")
        os.kill(pid, signal.SIGKILL)

    again, counts = _collect(world, 1, kill)
    assert counts["failed/lost"] == counts["retries"] >= 2 and counts["dropped"] == 0
    _assert_same(first, again)

    back = until(lambda: [r for r in world.fleet.engines() if r.key == ("1.0", 2)], "it did not come back", 240)
    assert _pid_of(world, "1.0") != pid and back[0].url
    assert [record.id for record in world.fleet.synced_engines()] == ["0.0"]
    _publish(world)
    third, counts = _collect(world, 2)
    assert counts["engine/1.0"] > 0 and counts["retries"] == 0
    _assert_same(first, third)


def test_evaluation_on_real_engines(world):
    _publish(world)
    prompts = [NumberedPrompts().at(position) for position in range(5)]
    greedy = SamplingConfig(samples=2, temperature=0.0, max_response_tokens=8)
    results = [leader.generate_eval(prompts, greedy, 1, version=VERSION) for leader in world.leaders]
    assert [len(result.groups) for result in results] == [3, 2]
    for group in (group for result in results for group in result.groups):
        assert group.samples[0].response_ids.tolist() == group.samples[1].response_ids.tolist()
    truncated = SamplingConfig(samples=8, top_k=1, max_response_tokens=8)
    (group,) = world.leaders[0].generate_eval(prompts[:1], truncated, 1, version=VERSION).groups
    assert all(s.response_ids.tolist() == results[0].groups[0].samples[0].response_ids.tolist() for s in group.samples)


def test_all_engines_dead_is_a_fault(world):
    _publish(world)
    pids = [_pid_of(world, name) for name in ("0.0", "1.0")]

    def kill():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(MachineFault, match="no engine holds this run's weights since 2 s"):
        _collect(world, 9, kill)


def _pid_of(world, engine):
    """Process id of an engine's present incarnation."""
    (record,) = [record for record in world.fleet.engines() if record.id == engine]
    (pid,) = processes_with(f"--port\0{record.url.rpartition(':')[2]}\0")
    return pid
