"""Leaders that go on sampling while steps are trained: who may begin what, and who takes it. Scripted engines."""

import asyncio
import threading
import time

import numpy as np
from rollout_parts import GENERATION, Stage, make_config
from scripted_engine import ScriptedEngine

from megarl.data.sample import version_number
from megarl.rollout.course import Course
from megarl.rollout.dispatch import Draws, wait_for_decision
from megarl.rollout.ledger import Tickets
from megarl.rollout.protocol import Completion, format_version


def _positions(results):
    return sorted(group.prompt.position for result in results for group in result.groups)


def _until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _config(need=4, steps=100, **rollout):
    config = make_config(need=need, rollout={"max_lag": 1, **rollout})
    return config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})


class _Slow(ScriptedEngine):
    """Answers the prompts of `held` only once they are let go."""

    def __init__(self):
        super().__init__()
        self.held = set()

    async def generate(self, request):
        first = (await request.json())["input_ids"][0]
        while first in self.held:
            await asyncio.sleep(0.01)
        return await super().generate(request)


def test_a_slow_group_holds_up_the_step_of_its_deadline_only():
    engine = _Slow()
    engine.held = {1}
    with Stage([engine], leaders=2, config=_config()) as stage:
        decision, results = stage.collect(0)  # as many as a step needs of the 8 that may be under way
        assert len(decision.numbers) == 4 and 1 not in decision.numbers and decision.waited_s.keys() <= {"samples"}
        taken = _positions(results)
        stage.sync(format_version(GENERATION, 1))
        stage.dispatcher.open(1, format_version(GENERATION, 1))
        _until(lambda: len(engine.requests) == 11)  # all but the held one, whose request is not counted yet
        let_go = time.monotonic()

        def alive():
            stage.alive()
            if time.monotonic() - let_go > 0.3:
                engine.held = set()

        stage.dispatcher.decide(1, alive)
        decision = wait_for_decision(stage.ear, alive)
        assert 1 in decision.numbers and decision.waited_s["deadline"] > 0.2
        results = [generator.take(decision.numbers) for generator in stage.generators]
        taken += _positions(results)
        assert sorted((*taken, *decision.unfinished)) == list(range(12)) == list(range(decision.position))
        # what was asked for before the publish counts as old, what came after it does not
        (slow,) = [group for result in results for group in result.groups if group.prompt.position == 1]
        assert [version_number(version) for version, _, _ in slow.samples[0].versions] == [1]


def test_the_last_steps_ask_for_no_more_than_they_need():
    engine = ScriptedEngine()
    with Stage([engine], config=_config(steps=3)) as stage:
        taken = [number for step in range(3) for number in stage.collect(step)[0].numbers]
        time.sleep(0.1)
    assert sorted(taken) == list(range(12)) and len(engine.requests) == 12


def test_what_an_earlier_life_left_over_is_drawn_first():
    engine = ScriptedEngine()
    with Stage([engine], config=_config(need=2, steps=2)) as stage:
        draws = Draws(unfinished=(3, 7, 9), position=12)
        for part in (stage.dispatcher, *stage.generators):
            part._draws = draws
        first, results = stage.collect(0)
        second, more = stage.collect(1)
    assert _positions(results) + _positions(more) and sorted(_positions(results) + _positions(more)) == [3, 7, 9, 12]
    assert sorted((*_positions(results), *first.unfinished)) == [3, 7, 9, 12] and first.position == 13
    assert (second.unfinished, second.position) == ([], 13)


def test_of_what_was_left_over_some_may_be_left_over_again():
    with Stage([ScriptedEngine()], config=_config(need=2, steps=9, max_lag=0)) as stage:
        for part in (stage.dispatcher, *stage.generators):
            part._draws = Draws(unfinished=(3, 7, 9, 11, 15), position=20)
        decision, results = stage.collect(0)
        assert (_positions(results), decision.unfinished, decision.position) == ([3, 7], [9, 11, 15], 20)


def test_a_draw_that_nobody_has_issued_yet_is_not_lost():
    with Stage([ScriptedEngine()], config=_config(steps=2)) as stage:
        Tickets(stage.store).draw()  # by a leader that is slow to issue it
        decision, _ = stage.collect(0)
        drawn = set(decision.numbers) | set(decision.unfinished)
        assert drawn == set(range(decision.position)) and min(drawn - set(decision.numbers)) in (0, 1)


def test_hold_lets_what_is_under_way_end_and_nothing_begin():
    engine = ScriptedEngine(delay_s=0.2)
    with Stage([engine], config=_config(groups_in_flight=3)) as stage:
        stage.dispatcher.open(0, format_version(GENERATION, 0))
        _until(lambda: engine.running == 3)
        stage.dispatcher.hold(stage.alive)
        assert not wait_for_decision(stage.ear, stage.alive).joins
        begun = len(engine.requests)
        time.sleep(0.5)
        assert engine.running == 0 and len(engine.requests) == begun < 8
        decision, _ = stage.collect(0)
        assert len(decision.numbers) == 4


def test_a_step_opens_when_its_weights_arrive_whatever_the_trainers_do():
    """Its groups are taken from those sampled ahead before that; what may be under way does not grow by it."""
    engine, arrived = ScriptedEngine(), threading.Event()
    with Stage([engine], config=_config()) as stage:
        course = Course(stage.ear, lambda: None, stage.dispatcher, stage.generators[0], lambda: None)
        course.open(0, format_version(GENERATION, 0))
        assert len(course.decide(0).numbers) == 4
        _until(lambda: len(stage.generators[0]._kept) == 8)
        course.open(1, format_version(GENERATION, 1), arrived.is_set)
        assert len(course.decide(1).numbers) == 4
        time.sleep(0.2)
        assert len(engine.requests) == 8  # the engines have the old weights
        stage.sync(format_version(GENERATION, 1))
        arrived.set()
        _until(lambda: len(engine.requests) == 12)  # no call of this thread is needed
        time.sleep(0.2)
        assert len(engine.requests) == 12


def test_engines_that_come_up_get_weights_also_while_sampling_is_held():
    engine = ScriptedEngine(delay_s=0.5)
    joined = [True]
    with Stage([engine], config=_config(groups_in_flight=1)) as stage:
        dispatcher = stage.dispatcher
        dispatcher._joined, dispatcher._asked_at = joined.pop, float("-inf")
        dispatcher.open(0, format_version(GENERATION, 0))
        _until(lambda: engine.running)
        caught_up = []

        def catch_up():
            caught_up.append(engine.running)
            dispatcher._joined = lambda: False

        Course(stage.ear, catch_up, dispatcher, stage.generators[0], lambda: None).hold()
        assert caught_up == [1] and engine.running == 0


def test_an_aborted_answer_is_continued_from_where_it_was():
    """The engine aborts twice; what comes in the end is all three pieces, asked for with one another as prompts."""
    engine = ScriptedEngine()
    engine.order("abort", times=1, first_token=2)
    config = _config(on_update="abort", max_lag=1)
    with Stage([engine], config=config) as stage:
        decision, results = stage.collect(0)
        _until(lambda: stage.generators[0]._kept or decision.numbers)
        groups = {group.prompt.position: group for result in results for group in result.groups}
        while 2 not in groups:
            decision, results = stage.collect(1)
            groups |= {group.prompt.position: group for result in results for group in result.groups}
        asked = [request for request in engine.requests if request["input_ids"][0] == 2]
        sample = groups[2].samples[0]
        assert len(asked) == 2 and asked[1]["sampling_params"]["n"] == 1
        beginning = asked[1]["input_ids"][3:]
        assert beginning and sample.response_ids.tolist()[:len(beginning)] == beginning
        assert asked[1]["sampling_params"]["max_new_tokens"] == 6 - len(beginning)
        assert sample.versions[0][1:] == (0, len(beginning)) and sample.versions[-1][2] == len(sample.response_ids)
        assert len(sample.logprobs) == len(sample.response_ids) and sample.finish != "abort"


def test_pieces_of_an_answer_join():
    first = Completion(np.array([5, 6], np.int32), np.array([-1, -2], np.float32), "abort", [("g:1", 0, 2)], 3)
    more = Completion(np.array([7], np.int32), np.array([-3], np.float32), "stop", [("g:2", 0, 1)], 9)
    whole = first.then(more)
    assert whole.response_ids.tolist() == [5, 6, 7] and whole.logprobs.tolist() == [-1, -2, -3]
    assert (whole.finish, whole.versions, whole.cached_tokens) == ("stop", [("g:1", 0, 2), ("g:2", 2, 3)], 3)
