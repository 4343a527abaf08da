"""How engines lie on rollout ranks, and engines by address: derived sizes and their checks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megarl.config.schema import Config
from megarl.errors import UserMistake

_URL = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})")


def gpus(config: Config) -> int:
    """Ranks that one engine has, each on a GPU of its own: SGLang's tp_size x pp_size; 1 for an embedded engine."""
    if config.rollout.engine != "sglang":
        return 1
    return int(config.sglang.get("tp_size", 1)) * int(config.sglang.get("pp_size", 1))


def nodes(config: Config) -> int:
    """Consecutive rollout ranks over which one engine is spread."""
    have = config.rollout.gpus_per_rank
    return 1 if have is None or config.rollout.engine != "sglang" else max(1, -(-gpus(config) // have))


def host_of(url: str) -> str:
    """`http://[::1]:30000` -> `::1`."""
    return _URL.fullmatch(url)[1].strip("[]")


def describe(config: Config) -> str:
    """`2 rollout + 1 url`."""
    ranks, urls = config.cluster.rollouts, len(config.rollout.urls)
    return " + ".join([*([f"{ranks} rollout"] if ranks else []), *([f"{urls} url{'s' * (urls > 1)}"] if urls else [])])


def check(config: Config) -> Iterator[UserMistake]:
    """Mistakes in `rollout.urls`, `rollout.gpus_per_rank` and the numbers that go with them."""
    rollout, ranks = config.rollout, config.cluster.rollouts
    if config.debug.replay_experience:
        return  # without engines
    if not ranks and not rollout.urls:
        yield UserMistake("no rank starts engines, and no engine is named", "cluster.rollouts",
                          "use 1 or more, or give rollout.urls")
    for number, url in enumerate(rollout.urls):
        if not _URL.fullmatch(url):
            yield UserMistake(f"{url!r} is not an engine's address", f"rollout.urls.{number}",
                              "for example http://node7:30000, without a path")
        elif url in rollout.urls[:number]:
            yield UserMistake(f"{url} is there twice", f"rollout.urls.{number}", "name each engine once")
    sizes = [config.sglang.get(name, 1) for name in ("tp_size", "pp_size")]
    if rollout.engine == "sglang" and rollout.gpus_per_rank is not None and all(isinstance(n, int) for n in sizes):
        yield from _placement(config)


def _placement(config: Config) -> Iterator[UserMistake]:
    rollout, have, need, span = config.rollout, config.rollout.gpus_per_rank, gpus(config), nodes(config)
    if span == 1:
        if rollout.engines_per_rank * need > have:
            yield UserMistake(f"{rollout.engines_per_rank} engines of {need} GPUs on a rank's {have}",
                              "rollout.engines_per_rank", f"use at most {have // need}")
        return
    if need % have:
        yield UserMistake(f"an engine of {need} GPUs (sglang.tp_size x pp_size) does not fill ranks of {have}",
                          "rollout.gpus_per_rank", f"make the engine a multiple of {have} GPUs")
    if rollout.engines_per_rank > 1:
        yield UserMistake(f"an engine of {need} GPUs takes {span} ranks of {have} whole", "rollout.engines_per_rank",
                          "use 1")
    if config.cluster.rollouts % span:
        yield UserMistake(f"engines of {span} ranks each (rollout.gpus_per_rank) on {config.cluster.rollouts} ranks",
                          "cluster.rollouts", f"use a multiple of {span}")
