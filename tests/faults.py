"""Small whole runs whose engines are killed, stopped, cut off or made to answer garbage, and what must hold after it.

`tests/dist/test_faults.py` has a few faults of each kind, `tests/bench/faults.py` many, with a table.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from good_config import good_tree, write_files, write_tree
from interfere import Host
from supervised import until

ROOT = Path(__file__).resolve().parent.parent
KEYS = {"MEGARL_API_KEY": "faults-api", "MEGARL_ADMIN_KEY": "faults-admin"}
PROMPTS, SAMPLES = 8, 4
LEASE_S, REQUEST_S, SYNC_S, NO_ENGINE_S = 2.0, 5.0, 3.0, 20.0


def tree(folder: Path, steps: int, seed: int, lag: int = 1, engines: int = 2, **rollout: Any) -> dict[str, Any]:
    """A run of one trainer; requests queue for few slots, weights go in several buckets, silence is noticed soon."""
    tree = good_tree(folder)
    tree["run"] = {"dir": str(folder / "run"), "steps": steps, "seed": seed}
    tree["cluster"] = {"trainers": 1, "rollouts": 1, "device": "cpu", "lease_timeout_s": LEASE_S}
    tree["parallel"] = {}
    tree["data"] |= {"prompts_per_step": PROMPTS}
    tree["rollout"] |= {"samples_per_prompt": SAMPLES, "max_response_tokens": 40, "slots": 4, "max_lag": lag,
                        "engines_per_rank": engines, "request_timeout_s": REQUEST_S, "retries": 8,
                        "no_engine_timeout_s": NO_ENGINE_S, **rollout}
    tree["reward"] = {"terms": [{"name": "length", "options": {"soft": 8, "hard": 40}}], "workers": 1}
    tree["batch"] = {"max_tokens": 1024}
    tree["sync"] = {"bucket_mb": 1, "timeout_s": SYNC_S}
    tree["checkpoint"] = {"every": 0, "export": False}
    tree["eval"] = {"every": 0}
    tree["observe"] = {"rollouts": 1}
    return tree


class Run:
    """A run under the launcher, in processes of its own. A context manager; what is left at its end is killed.

    Args:
        folder: of its own; gets model and prompts.
        config: as `tree` makes it.
        prefix: words before the launcher (to put it into a network namespace).
    """

    def __init__(self, folder: Path, config: dict[str, Any], prefix: tuple[str, ...] = ()) -> None:
        self.folder, self.dir, self.steps_wanted = folder, Path(config["run"]["dir"]), config["run"]["steps"]
        if not (folder / "model").exists():
            write_files(folder)
        path = write_tree(folder, config)
        self._told = open(folder / "told", "w+")
        self._process = subprocess.Popen(
            [*prefix, "bash", str(ROOT / "launch" / "torchrun.sh"), str(path)], stdout=self._told,
            stderr=subprocess.STDOUT, env={**os.environ, **KEYS, "MEGARL_VENV": sys.prefix, "OMP_NUM_THREADS": "1"})

    def metrics(self) -> list[dict[str, float]]:
        """Those written so far, one a step."""
        with suppress(FileNotFoundError):
            text = (self.dir / "metrics.jsonl").read_text()
            return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]
        return []

    def samples(self) -> list[dict[str, Any]]:
        """All that were trained on."""
        return [json.loads(line) for path in sorted((self.dir / "rollouts").glob("step_*.jsonl"))
                for line in path.read_text().splitlines()]

    def told(self) -> str:
        """What the launcher, trainers and supervisors printed."""
        logs = [path.read_text(errors="replace") for path in sorted((self.dir / "logs").rglob("*"))
                if path.is_file() and not path.name.startswith("engine-")]
        return "\n".join([(self.folder / "told").read_text(), *logs])

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self._process.poll() is not None

    def wait(self, timeout_s: float) -> int:
        """Its exit status; AssertionError if it takes longer: it hangs."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {timeout_s:.0f} s:\n{self.told()[-3000:]}") from None

    def process(self, rank: str) -> int:
        """The process id of the rank that this entry of the environment names: `RANK=0` is trainer 0."""
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                words = (entry.parent / "cmdline").read_bytes().split(b"\0")
                if b"megarl.train" in words and str(self.folder / "config.yaml").encode() in words \
                        and rank.encode() in entry.read_bytes().split(b"\0"):
                    return int(entry.parent.name)
        raise AssertionError(f"there is no {rank}")

    def engines(self) -> list[Engine]:
        """The engine processes of the run that are there."""
        return engines_of(self.folder)

    def stop(self) -> None:
        """End it as Ctrl-C does."""
        if not self.ended:
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
            self._process.kill()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for engine in self.engines():
            engine.signal(signal.SIGKILL)
        self._told.close()


@dataclass(frozen=True)
class Engine:
    """An engine's process."""

    pid: int
    host: str
    port: int

    def ask(self, path: str = "/model_info") -> dict[str, Any]:
        """An answer; {} if there is none within half a second."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=0.5)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {KEYS['MEGARL_API_KEY']}"})
            return json.loads(connection.getresponse().read() or "{}")
        except (OSError, ValueError, http.client.HTTPException):
            return {}
        finally:
            connection.close()

    @property
    def serves(self) -> bool:
        """Whether it holds weights that a trainer published."""
        return ":" in self.ask().get("weight_version", "")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it alone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    @property
    def alive(self) -> bool:
        """Whether the process runs; one that only waits for its parent does not."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False


def engines_of(folder: Path) -> list[Engine]:
    """Embedded engines that serve the model below `folder`, by port."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError, ValueError):
            words = entry.read_bytes().decode(errors="replace").split("\0")
            if "megarl.rollout.embedded" in words and str(folder / "model") in words and "child.py" not in words[1]:
                value = dict(zip(words, words[1:], strict=False))
                found.append(Engine(int(entry.parent.name), value["--host"], int(value["--port"])))
    return sorted(found, key=lambda engine: engine.port)


@dataclass
class Fault:
    """One fault that was made.

    Attributes:
        kind: see FAULTS.
        step: steps finished when it was made.
        what: the state in which it hit.
        back_s: seconds until all engines served again.
    """

    kind: str
    step: int
    what: str
    back_s: float = 0.0


def when(run: Run, state: Callable[[dict[str, Any]], Any], rng: random.Random, delay_s: float = 0.0) -> Engine:
    """A random engine, as soon as it is in the state and up to `delay_s` later."""
    deadline, engines, looked = time.monotonic() + 60.0, [], 0.0
    while True:
        if time.monotonic() - looked > 0.2:
            assert time.monotonic() < deadline and not run.ended, f"never in that state:\n{run.told()[-3000:]}"
            engines, looked = run.engines(), time.monotonic()
        rng.shuffle(engines)
        for engine in engines:
            if state(engine.ask()):
                time.sleep(rng.uniform(0, delay_s))
                return engine


def kill_generating(run: Run, rng: random.Random) -> str:
    """kill -9 while sequences are decoded."""
    engine = when(run, lambda info: info.get("running"), rng, 0.05)
    info = engine.ask()
    engine.signal(signal.SIGKILL)
    return f"{info.get('running')} running, {info.get('waiting')} waiting, weights {info.get('weight_version')}"


def kill_updating(run: Run, rng: random.Random) -> str:
    """kill -9 between begin and end of a weight update; the trainer is held still to see that it is there."""
    trainer = run.process("RANK=0")
    for _ in range(200):
        when(run, lambda info: info.get("paused"), rng)
        time.sleep(rng.uniform(0, 0.01))
        os.kill(trainer, signal.SIGSTOP)
        try:
            open_ones = [engine for engine in run.engines() if engine.ask().get("update_open")]
            if open_ones:
                rng.choice(open_ones).signal(signal.SIGKILL)
                return f"update open on {len(open_ones)}"
        finally:
            os.kill(trainer, signal.SIGCONT)
    raise AssertionError("no update was caught")


def kill_starting(run: Run, rng: random.Random) -> str:
    """kill -9, and kill -9 again what is started in its place, before it is up or soon after."""
    before = {engine.pid for engine in run.engines()}
    when(run, lambda info: info, rng, 0.5).signal(signal.SIGKILL)
    new = until(lambda: [engine for engine in run.engines() if engine.pid not in before], "nothing was started again")
    time.sleep(rng.uniform(0, 1.5))
    was_up = bool(new[0].ask())
    new[0].signal(signal.SIGKILL)
    return "just up" if was_up else "starting"


def hang(run: Run, rng: random.Random) -> str:
    """SIGSTOP at a random time: it keeps its connections and says nothing."""
    engine = when(run, lambda info: info, rng, 1.0)
    info = engine.ask()
    engine.signal(signal.SIGSTOP)
    until(lambda: not engine.alive, "a hanging engine was not replaced", 60.0)
    return "in an update" if info.get("update_open") else f"{info.get('running')} running"


FAULTS = {"kill in generation": kill_generating, "kill in update": kill_updating, "kill in start": kill_starting,
          "hang": hang}


def make_faults(run: Run, kinds: list[str], seed: int, engines: int) -> list[Fault]:
    """Make the faults one after the other, each when all engines serve again after the one before."""
    rng, made = random.Random(seed), []
    until(lambda: run.ended or len(run.metrics()) > 1, "no first step", 120.0)
    for kind in kinds:
        fault = Fault(kind, len(run.metrics()), "")
        fault.what = FAULTS[kind](run, rng)
        begun = time.monotonic()
        until(lambda: run.ended or sum(engine.serves for engine in run.engines()) == engines,
              f"not all engines serve again after {kind} ({fault.what})", 90.0)
        assert not run.ended, run.told()[-3000:]
        fault.back_s = time.monotonic() - begun
        made.append(fault)
        time.sleep(rng.uniform(0, 0.5))
    return made


@dataclass
class Checked:
    """What a run shows in the end.

    Attributes:
        steps, samples: trained.
        twice, missing: samples trained more than once; and samples of the steps' prompts that never were.
        sums: over all steps, of the metrics named in `SUMMED` and of failures by reason.
    """

    steps: int
    samples: int
    twice: int
    missing: int
    sums: Counter[str] = field(default_factory=Counter)


SUMMED = ("rollout/retries", "rollout/resumed", "rollout/dropped_groups")


def check(run: Run) -> Checked:
    """Count what was trained, and assert what must hold after any fault.

    Each sample is trained at most once, in full groups; each token was made by weights of this run that were not newer
    than the step; what a sample says of itself (ids, log-probs, spans) has one length.
    """
    steps = [line for line in run.metrics() if line["step"] > 0]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    found = run.samples()
    counts = Counter((line["position"], line["n"]) for line in found)
    generations = set()
    for line in found:
        edges = [0] + [end for _, _, end in line["versions"]]
        assert edges[-1] == len(line["response_ids"]) == len(line["logprobs"]), line
        for version, _, _ in line["versions"]:
            generation, _, number = version.rpartition(":")
            generations.add(generation)
            assert int(number) < line["step"], f"step {line['step']} trained on weights {version}"
    assert len(generations) == 1, generations
    wanted = {(position, n) for position in range(PROMPTS * len(steps)) for n in range(SAMPLES)}
    sums: Counter[str] = Counter()
    for line in steps:
        sums.update({name: value for name, value in line.items()
                     if name in SUMMED or name.startswith("rollout/failed/")})
    return Checked(len(steps), len(found), sum(count > 1 for count in counts.values()),
                   len(wanted - counts.keys()), sums)


@contextmanager
def external_engines(folder: Path, ports: list[int], prefix: tuple[str, ...] = (), host: str = "127.0.0.1"
                     ) -> Iterator[None]:
    """Embedded engines that no supervisor started."""
    if not (folder / "model").exists():
        write_files(folder)
    processes = [subprocess.Popen(
        [*prefix, sys.executable, "-m", "megarl.rollout.embedded", "--model-path", str(folder / "model"), "--host",
         host, "--port", str(port), "--slots", "4", "--update-timeout", str(SYNC_S)],
        env={**os.environ, **KEYS, "OMP_NUM_THREADS": "1"}, cwd=ROOT) for port in ports]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def outside_run(folder: Path, steps: int, seed: int, lag: int, urls: list[str]) -> Iterator[Run]:
    """A run whose engines others started."""
    config = tree(folder, steps, seed, lag, urls=urls)
    config["cluster"]["rollouts"] = 0
    config["sync"]["engines_per_set"] = 1  # one that is cut off stalls itself alone
    with Run(folder, config) as run:
        until(lambda: run.ended or len(run.metrics()) > 1, "no first step", 120.0)
        yield run


def cut_off(run: Run, host: Host, rng: random.Random) -> Fault:
    """Cut a host off at a random time, for a random time: too short to be noticed, or long enough to be given up."""
    time.sleep(rng.uniform(0, 1.0))
    away_s = rng.choice((rng.uniform(0.1, 1.0), rng.uniform(3.0, 8.0)))
    (engine,) = [engine for engine in run.engines() if engine.host == host.address]
    info = engine.ask()
    fault = Fault("network", len(run.metrics()), "in an update" if info.get("update_open") else
                  f"{'paused' if info.get('paused') else 'serving'} for {'long' if away_s > 2 else 'a moment'}")
    host.cut()
    time.sleep(away_s)
    host.mend()
    begun = time.monotonic()
    until(lambda: run.ended or run.metrics()[-1].get("sync/engines") == len(run.engines()),
          f"not all engines got weights again after {fault.what}", 90.0)
    fault.back_s = time.monotonic() - begun
    return fault
