"""Leaders, fleet and client against engines that misbehave to order."""

import asyncio
import json
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rollout_parts import GENERATION, SEED, VERSION, NumberedPrompts, Stage, in_loop, make_config
from scripted_engine import ScriptedEngine, Serving, logprob_of, tokens_of

from megarl.config.schema import SamplingConfig
from megarl.data.sample import sample_seed
from megarl.errors import MachineFault, UserMistake
from megarl.rollout import lease
from megarl.rollout.balance import Balancer, Load
from megarl.rollout.client import EngineBusy, EngineClient, EngineFailed, EngineLost, EngineRefused, EngineTimeout
from megarl.rollout.fleet import EngineRecord
from megarl.rollout.ledger import Entry, Tickets
from megarl.rollout.protocol import BadAnswer, GenerateRequest, Sampling, format_version
from megarl.rollout.records import write_rollouts


def _check_samples(groups, step=0, most=6):
    """Every sample is what the scripted model makes of its identity."""
    for group in groups:
        for n, sample in enumerate(group.samples):
            seed = sample_seed(SEED, group.prompt.position, n)
            expected = tokens_of(seed, most)
            assert (sample.n, sample.seed) == (n, seed)
            assert sample.response_ids.tolist() == expected and sample.response_ids.dtype == np.int32
            assert sample.logprobs.tolist() == [logprob_of(token) for token in expected]
            assert sample.finish == ("length" if len(expected) == most else "stop")
            assert sample.text == f"<{expected}>" and sample.versions == [
                (format_version(GENERATION, step), 0, len(expected))]


def _positions(results):
    return [group.prompt.position for result in results for group in result.groups]


def test_leaders_draw_disjointly_and_completely():
    engines = [ScriptedEngine(delay_s=0.02) for _ in range(2)]
    with Stage(engines, leaders=3, config=make_config(need=20), start=5) as stage:
        before = stage.store.num_keys()
        for step, start in enumerate((5, 25, 45, 65)):
            decision, results = stage.collect(step)
            assert sorted(_positions(results)) == list(range(start, start + 20))
            assert all(_positions([result]) == sorted(_positions([result])) for result in results)
            assert (decision.position, decision.unfinished, decision.dropped) == (start + 20, [], 0)
            _check_samples([group for result in results for group in result.groups], step)
            assert stage.store.num_keys() <= before + 8  # counters, the version, the last announcements
        assert all(result.groups for result in results)
        assert all(len(engine.requests) > 20 for engine in engines)
        rids = [request["rid"] for engine in engines for request in engine.requests]
        assert len(set(rids)) == len(rids) == 80 and not any(a != b and b.startswith(a) for a in rids for b in rids)
        total = sum((result.counts for result in results), start=type(results[0].counts)())
        assert total["groups"] == 20 and total["samples"] == 80 and total["prompt_tokens"] == 240
        assert total["response_tokens"] == sum(len(s.response_ids) for r in results for g in r.groups
                                               for s in g.samples)
        assert total["engine/0.0"] + total["engine/1.0"] == 20 and total["retries"] == 0


def test_a_busy_leader_holds_nobody_up():
    """One leader's only request hangs: the other one draws what is left."""
    engine = ScriptedEngine(delay_s=0.01)
    engine.order("hang", times=1)
    with Stage([engine], leaders=2, config=make_config(need=8, rollout={"groups_in_flight": 1,
                                                                        "request_timeout_s": 1.5})) as stage:
        _, results = stage.collect()
    assert sorted(len(result.groups) for result in results) == [1, 7]


def test_back_pressure_is_kept_and_used():
    engine = ScriptedEngine(delay_s=0.05)
    with Stage([engine], leaders=2, config=make_config(need=30, rollout={"groups_in_flight": 3})) as stage:
        stage.collect()
    assert engine.most_running == 6


GARBAGE = ["html", "missing", "no_logprobs", "short_logprobs", "other_tokens", "nan", "out_of_range"]


@pytest.mark.parametrize("kind, reason", [
    *((kind, "bad_answer") for kind in GARBAGE), ("wrong_version", "wrong_version"), ("abort", "aborted"),
    ("cut", "lost"), ("500", "failed"), ("503", "busy")])
def test_a_failed_group_is_issued_again_elsewhere(kind, reason):
    engines = [ScriptedEngine(delay_s=0.01), ScriptedEngine(delay_s=0.01)]
    engines[0].order(kind, times=2)
    with Stage(engines, config=make_config(need=6)) as stage:
        _, (result,) = stage.collect()
    assert _positions([result]) == list(range(6))
    _check_samples(result.groups)
    assert result.counts[f"failed/{reason}"] == result.counts["retries"] == 2 and result.counts["dropped"] == 0
    first = {request["input_ids"][0] for request in engines[0].requests[:2]}
    assert first <= {request["input_ids"][0] for request in engines[1].requests}


def test_the_next_attempt_goes_to_another_engine_even_if_that_is_busier():
    engines = [ScriptedEngine(), ScriptedEngine(delay_s=0.3)]
    engines[0].order("html")
    with Stage(engines, config=make_config(need=8, rollout={"retries": 1, "groups_in_flight": 4})) as stage:
        _, (result,) = stage.collect()
    assert len(result.groups) == 8 and result.counts["retries"] > 0


def test_a_group_that_always_fails_is_dropped_and_counted():
    engines = [ScriptedEngine(), ScriptedEngine()]
    for engine in engines:
        engine.order("nan", first_token=2)
    with Stage(engines, leaders=2, config=make_config(need=5)) as stage:
        decision, results = stage.collect()
    assert sorted(_positions(results)) == [0, 1, 3, 4]
    assert (len(decision.numbers), decision.dropped, decision.position) == (4, 1, 5)
    tries = [request for engine in engines for request in engine.requests if request["input_ids"][0] == 2]
    assert len(tries) == 3  # the first and two retries
    assert sum(result.counts["failed/bad_answer"] for result in results) == 3


def test_a_step_whose_groups_are_all_dropped_takes_none():
    engine = ScriptedEngine()
    engine.order("html")
    with Stage([engine], leaders=2, config=make_config(rollout={"retries": 0})) as stage:
        decision, results = stage.collect()
    assert (decision.numbers, decision.dropped) == ([], 4) and not _positions(results)


def test_a_hanging_engine_times_out_is_told_to_abort_and_replaced():
    engines = [ScriptedEngine(), ScriptedEngine()]
    engines[0].order("hang")
    with Stage(engines, config=make_config(rollout={"request_timeout_s": 0.7})) as stage:
        _, (result,) = stage.collect()
    assert _positions([result]) == [0, 1, 2, 3]
    assert result.counts["failed/timeout"] == len(engines[0].requests) == len(engines[0].aborted) > 0
    assert sorted(engines[0].aborted) == sorted(request["rid"] for request in engines[0].requests)


def test_an_engine_without_current_weights_gets_no_request():
    engines = [ScriptedEngine(), ScriptedEngine()]
    with Stage(engines) as stage:
        restarted = EngineRecord("0.0", 2, stage.served[0].url, "up")
        stage.registrars[0].write(restarted)
        stage.collect()
        assert len(engines[0].requests) == 0 and len(engines[1].requests) == 4
        assert [record.id for record in stage.fleet.engines()] == ["0.0", "1.0"]  # a publish will reach it
        stage.records[0], stage.synced = restarted, [restarted, stage.records[1]]
        stage.collect(1)
        assert len(engines[0].requests) == 2


def test_an_engine_that_answers_no_request_is_condemned_though_it_is_healthy():
    engines = [ScriptedEngine(), ScriptedEngine()]
    with Stage(engines, config=make_config(rollout={"request_timeout_s": 0.2})) as stage:
        for call in (stage.fleet.timed_out, stage.fleet.timed_out, lambda record, _: stage.fleet.answered(record)) * 2:
            call(stage.records[0], "")
        assert stage.registrars[0].condemned("0.0") == (0, "")  # it answered in between
        engines[0].order("hang")
        for step in range(3):
            stage.collect(step)
        incarnation, why = stage.registrars[0].condemned("0.0")
        assert incarnation == 1 and "3 requests in a row got no answer, the last one: " in why and "0.2 s" in why
        assert stage.registrars[1].condemned("1.0") == (0, "")


def test_no_engine_left_is_a_clear_fault_in_time():
    engines = [ScriptedEngine(), ScriptedEngine()]
    with Stage(engines) as stage:
        for served in stage.served:
            served.close()
        stage.registrars[0].write(EngineRecord("0.0", 1, "", "down", "was killed by SIGKILL"))
        stage.registrars[1].write(EngineRecord("1.0", 2, stage.served[1].url, "up"))
        begun = time.monotonic()
        with pytest.raises(MachineFault, match=r"engine 0.0: down \(was killed by SIGKILL\); engine 1.0: up, without"):
            stage.collect()
        assert time.monotonic() - begun < 15  # no_engine_timeout_s is 1
        assert stage.generators[0]._issuer._balancer._in_flight.total() == 0


def test_a_silent_rollout_rank_takes_its_engines_along(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(lease, "time", clock)
    with Stage([ScriptedEngine(), ScriptedEngine()], config=make_config(cluster={"lease_timeout_s": 0.5})) as stage:
        stage.fleet.records()
        clock.now += 0.4
        assert len(stage.fleet.engines()) == 2
        stage.registrars[1].beat()
        stage.fleet.records()
        clock.now += 0.4
        assert [record.id for record in stage.fleet.engines()] == ["1.0"]
        with pytest.raises(MachineFault, match="1 of 2 engines are not up .*engine 0.0: rollout rank 0 is silent"):
            stage.fleet.wait_ready(0.1)


def test_a_refused_request_ends_the_run():
    engine = ScriptedEngine(delay_s=0.05)
    engine.order("400", first_token=1)
    with Stage([engine]) as stage:
        with pytest.raises(UserMistake, match="refuses the request p1: .*status 400.*ordered 400"):
            stage.collect()
        assert len(engine.requests) == 4


def test_another_leader_lost_is_a_fault():
    config = make_config(rollout={"request_timeout_s": 0.1, "retries": 0, "no_engine_timeout_s": 0.1},
                         cluster={"timeout_s": 0.3})
    with Stage([ScriptedEngine()], config=config) as stage:
        lost = Tickets(stage.store)
        lost.write(Entry(lost.draw(), "issued"))  # and never resolves it
        with pytest.raises(MachineFault, match="1 groups are with leaders that have finished none"):
            stage.collect()


def _odd(group):
    return group.prompt.position % 2 == 1


def test_dynamic_sampling_refills_with_exactly_what_is_missing():
    with Stage([ScriptedEngine()], leaders=2, config=make_config(need=8), keep=_odd) as stage:
        decision, results = stage.collect()
    assert sorted(_positions(results)) == [1, 3, 5, 7, 9, 11, 13, 15]
    assert sorted(g.prompt.position for r in results for g in r.filtered) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert (decision.position, decision.unfinished) == (16, [])


def test_dynamic_sampling_is_bounded():
    config = make_config(objective={"refill_rounds": 2})
    with Stage([ScriptedEngine()], leaders=2, config=config, keep=lambda group: group.prompt.position == 3) as stage:
        decision, results = stage.collect()
        assert (_positions(results), decision.position) == ([3], 12)  # 4 and at most 8 in their places
        decision, results = stage.collect(1)
        assert (_positions(results), decision.position) == ([], 24)  # turned away, not dropped: no fault
        assert len([group for result in results for group in result.filtered]) == 12


def test_scoring_goes_on_while_other_groups_are_generated():
    engine, seen = ScriptedEngine(delay_s=0.01), []

    async def score(samples):
        position = samples[0].prompt.position
        waits = 0
        while position == 0 and len(engine.requests) < 3 and waits < 500:  # not met if generation waits for scores
            await asyncio.sleep(0.01)
            waits += 1
        seen.append((position, len(engine.requests)))
        for sample in samples:
            sample.reward = 1.0
        return len(samples)

    with Stage([engine], config=make_config(need=3, rollout={"groups_in_flight": 1}), score=score) as stage:
        _, (result,) = stage.collect()
    assert sorted(position for position, _ in seen) == [0, 1, 2] and result.reports == [4, 4, 4]
    assert dict(seen)[0] == 3
    assert all(sample.reward == 1.0 for group in result.groups for sample in group.samples)


def test_a_failing_score_is_raised():
    async def score(samples):
        raise UserWarning("no such reward")

    with Stage([ScriptedEngine()], score=score) as stage:
        with pytest.raises(UserWarning, match="no such reward"):
            stage.collect()


def test_evaluation_is_dealt_by_index_with_its_own_sampling():
    engine = ScriptedEngine()
    prompts = [NumberedPrompts().at(position) for position in range(50, 57)]
    sampling = SamplingConfig(samples=2, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, max_response_tokens=3)
    with Stage([engine], leaders=2) as stage:
        results = [generator.generate_eval(prompts, sampling, 99, version=VERSION) for generator in stage.generators]
    assert [_positions([result]) for result in results] == [[50, 52, 54, 56], [51, 53, 55]]
    params = engine.requests[0]["sampling_params"]
    assert {name: params[name] for name in ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "n")} == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "max_new_tokens": 3, "n": 2}
    sample = results[1].groups[1].samples[1]  # prompt 3, n 1
    assert sample.response_ids.tolist() == tokens_of(sample_seed(99, 3, 1), 3)
    assert (results[0].counts["groups"], results[0].counts["dropped"], results[0].reports) == (4, 0, [])


def test_close_aborts_what_is_under_way():
    engine = ScriptedEngine()
    engine.order("hang")
    stage = Stage([engine])
    with stage:
        thread = threading.Thread(target=_swallow, args=(stage,))
        thread.start()
        while not engine.requests:
            time.sleep(0.01)
    thread.join(timeout=10)
    assert not thread.is_alive() and len(engine.aborted) == len(engine.requests)


def _swallow(stage):
    try:
        stage.collect()
    except BaseException:
        pass


def test_sglang_gets_no_list_of_seeds():
    engine = ScriptedEngine()
    with Stage([engine], config=make_config(rollout={"engine": "sglang"})) as stage:
        stage.collect()
    assert all("sampling_seed" not in request["sampling_params"] for request in engine.requests)


def test_requests_find_no_prefixes_of_older_weights_where_sglang_keeps_them():
    for on_update, expected in (("in_place", [format_version(GENERATION, 0), format_version(GENERATION, 1)]),
                                ("retract", [None, None])):
        engine = ScriptedEngine()
        with Stage([engine], config=make_config(rollout={"engine": "sglang", "on_update": on_update})) as stage:
            stage.collect(0)
            stage.collect(1)
        assert [request.get("extra_key") for request in engine.requests] == [one for one in expected for _ in range(4)]


def test_client_tells_failures_apart():
    engine = ScriptedEngine()
    request = GenerateRequest("r/", np.array([1, 2], np.int32), Sampling(4))
    with Serving(engine) as served:
        def call(kind, **options):
            engine.order(kind, times=1)
            return in_loop(lambda session: EngineClient(served.url, session, **options).generate(
                request, vocab_size=100))

        for kind, failure in (("400", EngineRefused), ("500", EngineFailed), ("503", EngineBusy), ("cut", EngineLost),
                              ("html", BadAnswer)):
            with pytest.raises(failure) as caught:
                call(kind)
            assert type(caught.value) is failure
        with pytest.raises(EngineTimeout):
            call("hang", request_timeout_s=0.3)
        with pytest.raises(EngineRefused, match="404"):  # it knows no updates
            in_loop(lambda session: EngineClient(served.url, session).begin_update())
        in_loop(lambda session: EngineClient(served.url, session).set_version(format_version(GENERATION, 4)))
        assert in_loop(lambda session: EngineClient(served.url, session).model_info()).weight_version == \
            format_version(GENERATION, 4)
    with pytest.raises(EngineLost):
        in_loop(lambda session: EngineClient(served.url, session, retries=1).model_info())


class _Flaky(ScriptedEngine):
    """Refuses the first two control calls, and says success: false to a third."""

    calls = 0

    async def set_version(self, request):
        from aiohttp import web

        self.calls += 1
        if self.calls <= 2:
            return web.Response(status=503)
        return web.json_response({"success": self.calls != 3, "message": "not now"})


def test_only_safe_calls_are_sent_again_and_success_is_read():
    engine = _Flaky()
    with Serving(engine) as served:
        with pytest.raises(EngineFailed, match="not now"):
            in_loop(lambda session: EngineClient(served.url, session).set_version("life:1"))
        assert engine.calls == 3
        in_loop(lambda session: EngineClient(served.url, session).set_version("life:1"))
        engine.order("503")
        with pytest.raises(EngineBusy):
            in_loop(lambda session: EngineClient(served.url, session).generate(
                GenerateRequest("r/", np.array([1], np.int32), Sampling(4)), vocab_size=100))
        assert len(engine.requests) == 1


def test_balancer_takes_the_least_loaded_and_spreads_ties():
    engines = [EngineRecord(f"0.{number}", 1, "", "up") for number in range(3)]
    balancer = Balancer()
    taken = [balancer.take(engines, set()) for _ in range(6)]
    assert sorted(record.id for record in taken) == ["0.0", "0.0", "0.1", "0.1", "0.2", "0.2"]
    balancer.give_back(taken[0])
    assert balancer.take(engines, set()) == taken[0]
    assert balancer.take(engines, {engines[0].key, engines[1].key}) == engines[2]
    assert balancer.take(engines[:1], {engines[0].key}) == engines[0]  # no other one
    assert len({Balancer(turn).take(engines, set()).id for turn in range(3)}) == 3


def test_balancer_goes_by_the_published_load_and_what_it_sent_since():
    def engines(*loads):  # (reading, running, waiting)
        return [EngineRecord(f"0.{number}", 1, "", "up", load=Load(*load)) for number, load in enumerate(loads)]

    fleet, balancer = engines((1, 30, 10), (1, 20, 0)), Balancer()
    taken = [balancer.take(fleet, set(), sequences=8).id for _ in range(4)]
    assert taken == ["0.1", "0.1", "0.1", "0.0"]  # 20, 28, 36, 44 against 40
    for _ in range(3):  # gone before the next reading: not counted twice
        balancer.give_back(fleet[1], sequences=8)
    assert [balancer.load(engine) for engine in fleet] == [48, 20]
    fleet = engines((2, 8, 3), (2, 20, 5))  # the first has what it was sent, and 3 of others
    assert balancer.take(fleet, set(), sequences=8).id == "0.0"
    assert [balancer.load(engine) for engine in fleet] == [19, 25]
    fleet = engines((3, 0, 0), (3, 20, 5))
    assert balancer.take(fleet, set(), sequences=8).id == "0.0"
    assert balancer.load(fleet[0]) == 24  # never below what this leader has there
    two = Balancer(leaders=2)  # the other leader is expected to do the same
    assert [two.take(engines((1, 20, 0), (1, 0, 0)), set(), sequences=8).id for _ in range(3)] == ["0.1", "0.1", "0.0"]


def test_an_affinity_keeps_its_engine_while_that_lives():
    engines = [EngineRecord(f"0.{number}", 1, "", "up") for number in range(3)]
    balancer = Balancer()
    first = balancer.take(engines, set(), "talk")
    assert {balancer.take(engines, set(), "talk") for _ in range(5)} == {first}
    assert {balancer.take(engines, set(), None).id for _ in range(2)} == {record.id for record in engines} - {first.id}
    other = balancer.take(engines, {first.key}, "talk")
    assert other != first and balancer.take(engines, set(), "talk") == other  # where its prefix is now
    restarted = [replace(record, incarnation=2, load=Load(1, 9 * (record.id == other.id), 0)) for record in engines]
    assert balancer.take(restarted, set(), "talk").id != other.id  # its cache is gone
    balancer.forget("talk")
    assert not balancer._homes


def test_loads_reach_the_leaders_and_stay_with_their_process():
    with Stage([ScriptedEngine(), ScriptedEngine()]) as stage:
        stage.registrars[0].write_load(stage.records[0], Load(4, 2, 3))
        assert [record.load for record in stage.fleet.records()] == [Load(4, 2, 3), None]
        assert stage.fleet.records()[0] == stage.records[0]  # a load does not make it another engine
        stage.registrars[0].write(replace(stage.records[0], incarnation=2))
        assert [record.load for record in stage.fleet.records()] == [None, None]


def test_records_are_written_whole(tmp_path):
    with Stage([ScriptedEngine()]) as stage:
        _, (result,) = stage.collect()
    halved = result.groups[0]
    halved.samples[:] = [replace(sample, prompt=replace(sample.prompt, label="\ud83d")) for sample in halved.samples]
    result.groups[1].samples[2].reward, result.groups[1].samples[2].reward_terms = 0.5, {"exact": 0.5}
    path = write_rollouts(tmp_path, 12, 3, result.groups)
    assert path == tmp_path / "rollouts" / "step_0012.rank3.jsonl"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 16 and lines[0]["label"] == "\ud83d"
    line, sample = lines[6], result.groups[1].samples[2]
    assert (line["position"], line["n"], line["reward"], line["reward_terms"]) == (1, 2, 0.5, {"exact": 0.5})
    assert line["response_ids"] == sample.response_ids.tolist() and line["response"] == sample.text
    assert line["logprobs"] == sample.logprobs.tolist() and line["versions"] == [list(sample.versions[0])]
