"""Layouts against the single process over 20 optimizer steps, with free and with recorded routing.

    python tests/bench/layouts.py [--steps 20] [--worlds 1,2,4,8] [--models qwen3,qwen3_moe]

What is measured: the models, samples, objectives, layouts and caps of tests/parity/test_layouts.py, in fp32. Every
three optimizer steps the samples become a new experience: reference and old log-probs, advantages, other minibatches.
For each layout and algorithm the table gives, against the single process with the cap of 96 tokens: the largest
|difference| of the loss (with balancing loss and z-loss) and the largest relative one of the gradient norm over all
steps, and the largest |difference| of a weight at the end. `free` routes each token by its own logits; rounding may
turn a near-tie of two experts over, then the runs part: `turned` counts the choices of a token in a layer, over all
forwards, that are not the single process's. `replay` forces the single process's choices in every forward, of the
log-prob passes and of training.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "parity")]

import test_layouts as parity  # noqa: E402
import torch  # noqa: E402

Choices = dict[tuple[int, int], torch.Tensor]  # (experience, forward of it) -> [layers, tokens of all samples, k]


class Routing:
    """Follows a chunk's forwards: keeps what its routers choose, or forces it, token by token of each sample.

    Within an experience every sample is in as many forwards on every layout (reference, old, training), so a choice is
    known by experience, forward, layer, sample and position.

    Args:
        chunk: the stage.
        lengths: int64 [samples], tokens.
        known: choices to force or to compare with; None: keep them in `kept` (needs all layers and samples here).
        force: whether to force them.
    """

    def __init__(self, chunk: Any, lengths: torch.Tensor, known: Choices | None, force: bool) -> None:
        self.lengths, self.known, self.force = lengths, known, force
        self.starts = lengths.cumsum(0) - lengths
        self.layers = slice(chunk.part.first_layer, chunk.part.first_layer + len(chunk.decoder.layers))
        self.kept: Choices = {}
        self.turned, self.experience = 0, -1
        self.next_experience()
        chunk.routers.keep_choices = True
        chunk.register_forward_pre_hook(self._before)
        chunk.register_forward_hook(self._after)

    def next_experience(self) -> None:
        """From now on the forwards are of the next experience."""
        self.experience += 1
        self.seen = torch.zeros_like(self.lengths)

    def _places(self, chunk: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(where each token that this rank's routers see is among all samples' tokens, whether it is a real one)."""
        starts = torch.cat((self.starts[batch.samples], torch.zeros(1, dtype=torch.int64)))
        real_t = ~batch.padding_t
        places_t = torch.where(real_t, starts[batch.sequence_t] + batch.positions_t, 0)
        if chunk.config.sequence_parallel:
            tp = chunk.pg_collection.tp
            places_t, real_t = (whole.chunk(tp.size())[tp.rank()] for whole in (places_t, real_t))
        return places_t, real_t

    def _key(self, batch: Any) -> tuple[int, int]:
        return self.experience, int(self.seen[batch.samples[0]])

    def _before(self, chunk: Any, args: tuple[Any]) -> None:
        if not self.force:
            return
        places_t, real_t = self._places(chunk, args[0])
        k = chunk.config.moe_router_topk
        choices = torch.arange(k).expand(len(chunk.decoder.layers), len(places_t), k).clone()  # padding goes anywhere
        if args[0].sequences:
            choices[:, real_t] = self.known[self._key(args[0])][self.layers, places_t[real_t]]
        args[0].experts.update({layer: rows.to(torch.int16) for layer, rows in zip(chunk.routers.layers, choices,
                                                                                   strict=True)})
        chunk.routers.routing = "replay"

    def _after(self, chunk: Any, args: tuple[Any], output: torch.Tensor) -> None:
        batch = args[0]
        if not batch.sequences:
            return
        places_t, real_t = self._places(chunk, batch)
        chosen = torch.stack([chunk.routers.choices[layer] for layer in range(len(chunk.decoder.layers))])
        chosen, places_t, key = chosen[:, real_t], places_t[real_t], self._key(batch)
        if self.known is None:
            shape = len(chosen), int(self.lengths.sum()), chosen.size(-1)
            self.kept.setdefault(key, torch.full(shape, -1))[:, places_t] = chosen
        else:
            theirs = self.known[key][self.layers, places_t]
            self.turned += int((chosen.sort(-1).values != theirs.sort(-1).values).any(-1).sum())
        self.seen[batch.samples] += 1


def run(rank: int, folder: str, cases: list[Any], models: list[str], steps: int,
        known: dict[tuple[str, str], Choices] | None) -> dict[Any, Any]:
    """All layouts of a world; rank 0 gives the results by (case, model, algorithm, replayed)."""
    from megatron.core import parallel_state

    from megarl.cluster.groups import make_groups

    results: dict[Any, Any] = {}
    for number, case in enumerate(cases):
        groups = make_groups(case.layout, datetime.timedelta(seconds=300), seed=1)  # once: each leaves its threads
        for model, algorithm in parity.RUNS:
            if model not in models or (case.layout.expert > 1 and "moe" not in model):
                continue
            for replayed in (False, True) if known and "moe" in model else (False,):
                results[number, model, algorithm, replayed] = _train(
                    f"{folder}/{model}", parity.config(f"{folder}/{model}", algorithm, case, True), groups,
                    steps, known and known.get((model, algorithm)), replayed)
        parallel_state.destroy_model_parallel()
    return results if rank == 0 else {}


def _train(path: str, settings: Any, groups: Any, steps: int, known: Choices | None, replayed: bool) -> dict[str, Any]:
    import torch.distributed as dist

    from megarl.checkpoint.hf_export import iter_hf_tensors

    policy = parity.make_policy(path, settings, groups)
    lengths = torch.from_numpy(parity.read_samples(path).lengths)
    routings = [Routing(chunk, lengths, known, replayed) for chunk in policy.chunks if chunk.routers is not None]
    stats: list[dict[str, float]] = []
    while len(stats) < steps:
        experience = parity.make_experience(path, policy, step=len(stats))
        stats += [policy.update(minibatch) for minibatch in experience.minibatches[:steps - len(stats)]]
        for routing in routings:
            routing.next_experience()
    turned = torch.tensor(sum(routing.turned for routing in routings))
    dist.all_reduce(turned)
    return {"losses": [one["policy/loss"] + one.get("moe/balance_loss", 0) + one.get("moe/z_loss", 0) for one in stats],
            "norms": [one["optim/grad_norm"] for one in stats], "turned": int(turned),
            "weights": parity.everywhere(iter_hf_tensors(policy.chunks, policy.hf)),
            "choices": routings[0].kept if routings else {}}


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, float, float]:
    """(largest |difference| of losses, largest relative one of norms, largest |difference| of weights)."""
    return (max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)),
            max(abs(a / b - 1) for a, b in zip(ours["norms"], theirs["norms"], strict=True)),
            max(float((tensor - theirs["weights"][name]).abs().max()) for name, tensor in ours["weights"].items()))


def main() -> None:
    """Run the worlds one after the other, print a row per layout, model and algorithm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--worlds", default="1,2,4,8")
    parser.add_argument("--models", default="qwen3,qwen3_moe")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from worlds import run_world

    models = given.models.split(",")
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            parity.models.save_hf_model(model, Path(folder) / model)
            parity.write_samples(Path(folder) / model, model)
        first = run_world(1, run, folder, parity.CASES[1][:1], models, given.steps, None, timeout=3600)[0]
        single = {key[1:3]: found for key, found in first.items()}
        known = {key: found["choices"] for key, found in single.items()}
        for (model, algorithm), found in single.items():
            print(f"{model} {algorithm}: loss {found['losses'][0]:.4f} -> {found['losses'][-1]:.4f}, "
                  f"gradient norm {found['norms'][0]:.3f} -> {found['norms'][-1]:.3f}")
        print(f"{'layout':58} {'model':9} {'':4}  free: {'loss':>7} {'norm':>7} {'weight':>7} {'turned':>6}  "
              f"replay: {'loss':>7} {'norm':>7} {'weight':>7}")
        for ranks in map(int, given.worlds.split(",")):
            cases = parity.CASES[ranks]
            found = run_world(ranks, run, folder, cases, models, given.steps, known, timeout=3600)[0]
            for (number, model, algorithm, replayed), ours in found.items():
                if replayed:
                    continue
                case, their = cases[number], single[model, algorithm]
                padded = ", padded" if type(case.layout) is parity.Padded else ""
                row = f"{f'{case.layout.describe()}, cap {case.max_tokens}{padded}':58} {model:9} {algorithm:4}       "
                row += " ".join(f"{value:7.1e}" for value in compare(ours, their))
                if "moe" in model:
                    values = compare(found[number, model, algorithm, True], their)
                    row += f" {ours['turned']:6}          " + " ".join(f"{value:7.1e}" for value in values)
                print(row, flush=True)


if __name__ == "__main__":
    main()
