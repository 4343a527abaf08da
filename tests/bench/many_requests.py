"""Many prompts queued at once: `python tests/bench/many_requests.py [--prompts 2000] [--engines 3] [--out FOLDER]`.

One leader asks embedded engines for a group of samples per prompt: first with the bound on what is in flight that a run
has by default, then with everything in flight at once. Told are errors, the leader's memory, how long a group takes
from being asked for to being there, and how long the leader waits from one group to the next; the two distributions
are drawn to FOLDER/many_requests.svg.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models import save_hf_model  # noqa: E402
from supervised import Supervised  # noqa: E402

from megarl.data.sample import Prompt, sample_seed  # noqa: E402
from megarl.rollout.client import EngineClient, open_session  # noqa: E402
from megarl.rollout.issue import Issuer, Work  # noqa: E402
from megarl.rollout.protocol import Expected, Sampling, format_version  # noqa: E402

VERSION = format_version("many.0.requests", 1)
VOCABULARY = 99
QUANTILES = (0.5, 0.9, 0.99, 1.0)


@dataclass
class Taken:
    """What a leader saw.

    Attributes:
        seconds: in all.
        answers: [groups] seconds from being asked for (queue of the leader included) to being there.
        gaps: [groups] seconds from one group to the next.
        counts: of the issuer.
        peak_mb, grown_mb: the process's memory: most, and more than before.
    """

    seconds: float
    answers: np.ndarray
    gaps: np.ndarray
    counts: Counter[str]
    peak_mb: float
    grown_mb: float


def resident_mb() -> float:
    """Of this process."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


@contextmanager
def watched() -> Iterator[list[float]]:
    """Readings of this process's memory, every 20 ms."""
    readings, end = [resident_mb()], threading.Event()

    def watch() -> None:
        while not end.wait(0.02):
            readings.append(resident_mb())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield readings
    finally:
        end.set()
        thread.join()


async def take(world: Supervised, prompts: int, at_once: int, sampling: Sampling) -> Taken:
    """Ask for all groups, `at_once` of them at a time; groups are counted and let go."""
    answers, arrivals = [], []
    work = Work(sampling, Expected(VERSION), Counter())
    async with open_session() as session:
        for engine in world.fleet.engines():
            await EngineClient(engine.url, session).set_version(VERSION)
        world.fleet.mark_synced(VERSION, world.fleet.engines())
        issuer = Issuer(world.config, world.fleet, session, rid_prefix=f"many/{at_once}", leader_index=0,
                        leaders=1, vocab_size=VOCABULARY, decode=lambda _: "")
        gate, rng, begun = asyncio.Semaphore(at_once), np.random.default_rng(0), time.monotonic()

        async def one(position: int) -> None:
            ids = rng.integers(3, VOCABULARY, rng.integers(4, 33)).astype(np.int32)
            prompt = Prompt(position, 0, position, "many", ids)
            async with gate:
                group = await issuer.group(prompt, [sample_seed(0, position, n) for n in range(sampling.n)], work)
            assert group is not None and len(group.samples) == sampling.n
            arrivals.append(time.monotonic() - begun)
            answers.append(arrivals[-1])

        with watched() as memory:
            await asyncio.gather(*map(one, range(prompts)))
        await issuer.close()
    return Taken(time.monotonic() - begun, np.array(answers), np.diff(sorted(arrivals), prepend=0.0), work.counts,
                 max(memory), max(memory) - memory[0])


def quantiles(values: np.ndarray, unit: float = 1.0) -> str:
    return " / ".join(f"{value * unit:.3g}" for value in np.quantile(values, QUANTILES))


def draw(found: dict[str, Taken], path: Path) -> None:
    """Both distributions as complements of cumulative ones, on logarithmic axes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, name, title in ((axes[0], "gaps", "from one group to the next"),
                              (axes[1], "answers", "from being queued to being there")):
        for label, taken in found.items():
            values = getattr(taken, name)
            longer = np.geomspace(1, 1 / len(values), 150)  # share of groups
            axis.plot(np.maximum(np.quantile(values, 1 - longer), 1e-5), longer, label=label)
        axis.set(xscale="log", yscale="log", xlabel="seconds", ylabel="share of groups that wait longer", title=title)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print the table; status 1 if a request failed or memory is not bounded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    sampling = Sampling(options.tokens, n=options.samples)
    with tempfile.TemporaryDirectory(prefix="many-") as name:
        folder = Path(name)
        save_hf_model("qwen3", folder / "model", 0, eos_token_id=2)
        with Supervised(folder, engines=options.engines, options=None, model=str(folder / "model"),
                        rollout={"slots": 32, "request_timeout_s": 600.0}) as world:
            world.fleet.wait_ready(120)
            asyncio.run(take(world, 100, 64, sampling))  # warm
            bound = world.config.rollout.groups_in_flight
            found = {f"{count} prompts, {at_once} in flight": asyncio.run(take(world, count, at_once, sampling))
                     for count, at_once in ((options.prompts // 4, bound), (options.prompts, bound),
                                            (options.prompts, options.prompts))}
    print(f"{options.engines} engines of 32 slots, {options.samples} samples of up to {options.tokens} tokens; "
          "quantiles: " + " / ".join(f"{q:.0%}" for q in QUANTILES))
    for label, taken in found.items():
        failed = {key: value for key, value in taken.counts.items() if key.startswith("failed/") or key == "dropped"}
        share = [taken.counts[f"engine/0.{number}"] for number in range(options.engines)]
        print(f"{label}: {taken.seconds:.1f} s, {taken.counts['response_tokens'] / taken.seconds:.0f} tokens/s, errors "
              f"{failed or 'none'}, groups by engine {share}\n"
              f"  memory at most {taken.peak_mb:.0f} MB, grown by {taken.grown_mb:.1f} MB\n"
              f"  from one group to the next, ms: {quantiles(taken.gaps, 1000)}\n"
              f"  from being queued to being there, s: {quantiles(taken.answers)}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    draw(found, options.out / "many_requests.svg")
    few, many, _ = found.values()
    unbounded = many.grown_mb > few.grown_mb + 20
    sys.exit(unbounded or any(taken.counts["retries"] + taken.counts["dropped"] for taken in found.values()))


if __name__ == "__main__":
    main()
