"""What a step takes: against all subsets that it could take, and over whole runs with answers of any length."""

from itertools import combinations

import numpy as np
import pytest

from megarl.rollout.admission import Choice, Pending, choose, fitting, window


def fits(left, need, step, max_lag):
    """Whether the groups left after step `step` can all be trained before their deadlines; counted step by step."""
    left = sorted(one.issued + max_lag for one in left)
    for late in range(step + 1, step + 2 + len(left)):
        if any(deadline < late for deadline in left):
            return False
        left = left[need:]  # the most urgent first, which is best if anything is
    return True


@pytest.mark.parametrize("max_lag", [0, 1, 2, 4])
def test_against_all_subsets(max_lag):
    """It takes if and only if some set of finished groups of the right size leaves the others in time."""
    random = np.random.default_rng(max_lag)
    outcomes = set()
    for _ in range(400):
        need, step = int(random.integers(1, 4)), 5
        issued = np.sort(random.integers(step - max_lag, step + 1, random.integers(0, need * (1 + max_lag) + 1)))
        if not fits([Pending(0, int(one), None) for one in issued], need, step - 1, max_lag):
            continue  # the window does not let it come to this
        order = random.permutation(len(issued))
        pending = [Pending(n, int(one), int(order[n]) if random.random() < 0.7 else None)
                   for n, one in enumerate(issued)]
        done = [one for one in pending if one.finished is not None]
        possible = [set(one.number for one in some) for some in combinations(done, need)
                    if fits([one for one in pending if one not in some], need, step, max_lag)]
        choice = choose(pending, need, step, max_lag)
        outcomes.add(choice.numbers is not None)
        if choice.numbers is None:
            assert not possible
        else:
            assert set(choice.numbers) in possible and choice.numbers == sorted(choice.numbers)
    assert outcomes == {True, False}


def test_what_finished_first_is_taken_and_the_slow_one_when_its_time_has_come():
    """Two groups a step, lag 1. Group 0 is slow: step 0 goes by without it, step 1 waits for it."""
    slow, *quick = (Pending(n, 0, finished) for n, finished in enumerate((None, 3, 1, 2)))
    assert choose([slow, *quick], 2, 0, 1).numbers == [2, 3]
    left = [slow, quick[0], Pending(4, 1, 4), Pending(5, 1, 5)]
    assert choose(left, 2, 1, 1) == Choice(None, "deadline")
    assert choose([Pending(0, 0, 6), *left[1:]], 2, 1, 1).numbers == [0, 1]


def test_without_lag_a_step_takes_all_of_its_version():
    pending = [Pending(0, 7, 2), Pending(1, 7, None), Pending(2, 7, 1)]
    assert choose(pending, 3, 7, 0) == Choice(None, "samples")
    assert choose([*pending[::2], Pending(1, 7, 3)], 3, 7, 0).numbers == [0, 1, 2]


def test_a_step_is_short_only_if_nothing_more_comes():
    pending = [Pending(0, 2, 1)]
    assert choose(pending, 2, 2, 0) == Choice(None, "samples")
    assert choose(pending, 2, 2, 0, closed=True).numbers == [0]
    assert choose([*pending, Pending(1, 2, None)], 2, 2, 1, closed=True) == Choice(None, "samples")
    assert choose([], 2, 2, 0, closed=True).numbers == []


@pytest.mark.parametrize("max_lag,ahead", [(0, 0), (1, 1), (1, 0.5), (2, 2), (3, 1.5)])
def test_over_a_run_nothing_is_old_or_lost(max_lag, ahead):
    """A run of 60 steps: 6 slots, lengths with a long tail, a step of training takes 3 ticks."""
    random, need, steps, slots = np.random.default_rng(7), 4, 60, 6
    lengths = (random.pareto(1.2, 10_000) * 3 + 1).astype(int)
    pending, running, drawn, finished, trained, gone = {}, {}, 0, 0, [], 0
    for step in range(steps):
        allowed = gone + window(need, ahead, step, steps)
        free_at, took = 3, None
        while took is None or free_at:
            while len(running) < slots and drawn < allowed:
                running[drawn], pending[drawn] = lengths[drawn], Pending(drawn, step, None)
                drawn += 1
            if took is None:
                took = choose(pending.values(), need, step, max_lag).numbers
                for number in took or []:
                    assert step - pending.pop(number).issued <= max_lag
            for number in list(running):
                running[number] -= 1
                if not running[number]:
                    del running[number]
                    finished += 1
                    pending[number] = Pending(number, pending[number].issued, finished)
            free_at -= took is not None
        trained += took
        gone += len(took)
        assert len(took) == need
    assert sorted(trained) == list(range(need * steps)) and not pending


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_of_held_groups_as_many_as_can_be_trained_in_time_are_kept(max_lag):
    """Against all subsets; and `choose` then trains every one of them in time, whatever else is sampled."""
    random, outcomes = np.random.default_rng(max_lag), set()
    for _ in range(200):
        need, step = int(random.integers(1, 4)), 9
        issued = random.integers(step - max_lag - 2, step + 1, random.integers(0, 9)).tolist()
        held = [Pending(number, one, number) for number, one in enumerate(issued)]
        kept = fitting(issued, need, step, max_lag)
        possible = [some for size in range(len(held) + 1) for some in combinations(range(len(held)), size)
                    if fits([held[place] for place in some], need, step - 1, max_lag)]
        assert tuple(kept) in possible and len(kept) == max(map(len, possible))
        outcomes.add((len(kept) < sum(one >= step - max_lag for one in issued), len(kept) == len(issued)))
        left, drawn = {place: held[place] for place in kept}, 100
        for now in range(step, step + max_lag + 1):
            while len(left) < window(need, max_lag, now, 99):
                left[drawn], drawn = Pending(drawn, now, drawn), drawn + 1
            for number in choose(left.values(), need, now, max_lag).numbers:
                assert left.pop(number).issued >= now - max_lag
        assert not any(number < 100 for number in left)
    assert {(True, False), (False, True), (False, False)} == outcomes


def test_without_a_change_all_are_kept_else_what_finished_last_goes():
    assert fitting([3, 4, 4, 3, 4], 2, 4, 2) == [0, 1, 2, 3, 4]
    assert fitting([3, 4, 4, 3, 4], 2, 4, 0) == [1, 2]  # made with a larger max_lag
    assert fitting([3, 4, 4, 3, 4], 1, 4, 2) == [0, 1, 2]  # made with more prompts a step
    assert fitting([], 2, 4, 0) == []


def test_the_window_ends_with_the_run():
    assert [window(8, 2, step, 5) for step in range(5)] == [24, 24, 24, 16, 8]
    assert window(8, 0.5, 0, 5) == 12
