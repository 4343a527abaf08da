"""The worker processes: what comes back, and what happens when a reward function goes wrong."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from megarl.config.schema import RewardConfig
from megarl.data.sample import Prompt, Sample
from megarl.errors import MachineFault, UserMistake
from megarl.reward.pool import RewardPool, ScoreReport

NONE = np.zeros(0, np.int32)


def samples(*texts, label="1", source=""):
    prompt = Prompt(3, 0, 0, source, NONE, label)
    return [Sample(prompt, n, 0, NONE, NONE.astype(np.float32), "stop", text) for n, text in enumerate(texts)]


def config(*terms, **options):
    terms = [{"name": term} if isinstance(term, str) else term for term in terms]
    return RewardConfig.model_validate({"terms": terms, "workers": 2, **options})


def rewards(batch):
    return [sample.reward for sample in batch]


def gone(pid):
    """The process has ended, or is about to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition):
    for _ in range(500):
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_weighted_sum_and_sources():
    terms = [{"name": "exact", "weight": 2.0},
             {"name": "length", "weight": -0.5, "options": {"soft": 1, "hard": 3, "unit": "characters"}},
             {"name": "exact", "source": "strict", "options": {"ignore_case": True}}]
    with RewardPool(config(*terms)) as pool:
        batch = samples("1", "12", "") + samples("1", source="strict")
        report = pool.score(batch)
    assert rewards(batch) == [1.5, -0.25, -0.5, 2.5]
    assert batch[1].reward_terms == {"exact": 0.0, "length": 0.5}
    assert batch[3].reward_terms == {"exact": 1.0, "length": 1.0, "exact#2": 1.0}
    assert (report.samples, report.failed, report.describe()) == (4, 0, "")


def test_what_a_function_sees(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "1")
    prompt = Prompt(0, 0, 0, "digits", NONE, {"a": 1}, "sort", {"k": [1]})
    batch = [Sample(prompt, 0, 0, np.arange(3, dtype=np.int32), np.zeros(3, np.float32), "length", "x")]
    names = ["reward_cases:view", "reward_cases:loaded", "reward_cases:environment", "reward_cases:later"]
    with RewardPool(config(*names)) as pool:
        pool.score(batch)
    assert list(batch[0].reward_terms.values()) == [1.0, 0.0, 0.0, 0.5]


def test_failures_are_counted_and_only_theirs(tmp_path):
    bad = ["raise", "exit", "nan", "inf", "none", "text", "hang", "hang in C", "hang with child", "die"]
    texts = [text for pair in zip(bad, ["ok"] * len(bad), strict=True) for text in pair]
    with RewardPool(config("reward_cases:behave", timeout_s=2)) as pool:
        batch = samples(*texts, label=str(tmp_path / "child"))
        report = pool.score(batch)
        assert wait_until(lambda: gone((tmp_path / "child").read_text()))
        again = samples("abc", "abcd", "x", "y")
        assert pool.score(again).failed == 0 and rewards(again) == [3.0, 4.0, 1.0, 1.0]
    assert rewards(batch) == [None, 2.0] * len(bad)
    assert (report.samples, report.failed, report.dropped) == (20, 10, 10)
    name = "reward_cases:behave"
    assert report.failures == {(name, "raised"): 2, (name, "not finite"): 2, (name, "not a number"): 2,
                               (name, "timed out"): 3, (name, "died"): 1}
    assert report.examples[0] == f"{name} raised on sample (3, 0): KeyError: 'no such answer'"
    assert len(report.examples) == 5
    assert report.describe().startswith(f"reward failed for 10 of 20 samples (10 dropped): {name} died x1, ")


def test_a_stated_value_and_the_other_terms():
    terms = config("exact", "reward_cases:behave", "exact", on_error="value", error_value=-1.0, workers=1)
    with RewardPool(terms) as pool:
        batch = samples("raise", "die", "1")
        report = pool.score(batch)
    assert rewards(batch) == [-1.0, -1.0, 3.0]
    assert [sample.reward_terms for sample in batch] == [
        {"exact": 0.0, "exact#2": 0.0}, {"exact": 0.0}, {"exact": 1.0, "reward_cases:behave": 1.0, "exact#2": 1.0}]
    assert (report.failed, report.dropped) == (2, 0)
    assert report.failures["exact#2", "not run"] == 1
    assert "its worker ended with status 7" in report.describe()


def test_threads_and_asyncio_at_once():
    with RewardPool(config("reward_cases:behave", timeout_s=2)) as pool:
        batches = [samples(*["a" * (n + 1)] * 40) for n in range(4)] + [samples("hang", "ok")]
        threads = [threading.Thread(target=pool.score, args=(batch,)) for batch in batches]
        for thread in threads:
            thread.start()

        async def groups():
            more = [samples(*["b" * (n + 1)] * 40) for n in range(4)]
            reports = await asyncio.gather(*(pool.score_group(batch) for batch in more))
            return more, reports

        more, reports = asyncio.run(groups())
        for thread in threads:
            thread.join()
    assert [rewards(batch) for batch in more] == [rewards(batch) for batch in batches[:4]] == [
        [n + 1.0] * 40 for n in range(4)]
    assert rewards(batches[4]) == [None, 2.0]
    assert sum(report.samples for report in reports) == 160


def test_a_thousand_samples():
    with RewardPool(config({"name": "numeric"})) as pool:
        batch = samples(*(f"so it is {n % 2}" for n in range(1000)))
        assert pool.score(batch).failed == 0
    assert rewards(batch) == [0.0, 1.0] * 500


def test_mistakes_at_start():
    before = set(os.listdir("/proc"))
    with pytest.raises(UserMistake, match=r"reward.terms.1.name: unknown reward function 'exct'"):
        RewardPool(config("exact", "exct"))
    with pytest.raises(UserMistake, match="reward.error_value"):
        RewardPool(config("exact", on_error="value"))
    with RewardPool(config({"name": "exact", "source": "a"})) as pool:
        with pytest.raises(UserMistake, match="no reward term applies to the data source 'b'"):
            pool.score(samples("x", source="b"))
    assert not [pid for pid in set(os.listdir("/proc")) - before if pid.isdigit() and _is_worker(pid)]


def _is_worker(pid):
    try:
        return b"megarl.reward.worker" in Path(f"/proc/{pid}/cmdline").read_bytes() and \
            Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1] == str(os.getpid())
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_close_ends_hanging_workers_and_waiting_calls():
    pool = RewardPool(config("reward_cases:behave", timeout_s=1000))
    pids = [worker.pid for worker in pool._workers]
    taken = [pool._submit(sample).future for sample in samples("hang", "hang in C")]
    assert wait_until(lambda: pool._jobs.qsize() == 0)
    caught = []

    def score():
        try:
            pool.score(samples("ok", "ok"))
        except MachineFault as fault:
            caught.append(str(fault))

    thread = threading.Thread(target=score)
    thread.start()
    assert wait_until(lambda: pool._jobs.qsize() == 2)
    pool.close()
    thread.join(60)
    assert caught + [str(future.exception(60)) for future in taken] == ["the reward pool is closed"] * 3
    assert all(gone(pid) for pid in pids)
    with pytest.raises(MachineFault, match="closed"):
        pool.score(samples("ok"))
    pool.close()


def test_workers_that_cannot_be_replaced_are_a_fault(monkeypatch):
    pool = RewardPool(config("reward_cases:behave", workers=1))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    batch = samples("die", "ok")
    with pytest.raises(MachineFault, match="ended at its start with status 1"):
        pool.score(batch)
    pool.close()


PARENT = """
import sys, threading
import numpy as np
from megarl.config.schema import RewardConfig
from megarl.data.sample import Prompt, Sample
from megarl.reward.pool import RewardPool
pool = RewardPool(RewardConfig(terms=[{"name": "reward_cases:behave"}], workers=2, timeout_s=1000))
none = np.zeros(0, np.int32)
threading.Thread(target=pool.score, daemon=True,
                 args=([Sample(Prompt(0, 0, 0, "", none), 0, 0, none, none, "stop", "hang in C")],)).start()
print(*[worker.pid for worker in pool._workers], flush=True)
if sys.argv[1] == "wait":
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["killed", "returns"])
def test_workers_die_with_the_parent(end):
    """One of them idle, the other in a call that holds its interpreter."""
    tests = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{tests.parent.parent}:{tests}"}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, "wait" if end == "killed" else "go"], env=env,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    if end == "killed":
        parent.kill()
    parent.communicate()
    assert wait_until(lambda: all(gone(pid) for pid in pids))


def test_reports_add_up():
    total = ScoreReport()
    for n in range(3):
        total.add(ScoreReport(4, 3, n, {("a", "raised"): 3}, [f"{n}{k}" for k in range(3)]))
    assert (total.samples, total.failed, total.dropped, total.failures["a", "raised"]) == (12, 9, 3, 9)
    assert total.examples == ["00", "01", "02", "10", "11"]
