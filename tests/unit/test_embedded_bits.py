"""A request alone and in a crowd: tokens and log-probs equal to the bit, on the products that this CPU really takes.

Runs in a process of its own, as the engine does: MKL's mode is chosen before torch is loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# Sizes that are no multiples of anything, more than 512 keys, both forms of experts, group sizes 1, 2 and 3.
MODELS: dict[str, dict[str, Any]] = {
    "fused experts": dict(model_type="qwen3_moe", hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
                          head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64),
    "sorted experts": dict(model_type="qwen3_moe", hidden_size=72, num_attention_heads=6, num_key_value_heads=2,
                           head_dim=16, num_experts=40, num_experts_per_tok=3, moe_intermediate_size=100),
    "small heads": dict(model_type="qwen3_moe", hidden_size=32, num_attention_heads=4, num_key_value_heads=4,
                        head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "dense": dict(model_type="qwen2", hidden_size=96, num_attention_heads=3, num_key_value_heads=3,
                  intermediate_size=1536, head_dim=32)}
COMMON = dict(vocab_size=99, num_hidden_layers=2, intermediate_size=64, max_position_embeddings=2048,
              norm_topk_prob=True, eos_token_id=1, tie_word_embeddings=False)
WATCHED = (1, 5, 16, 33, 560)  # prompt lengths


def test_neighbours_do_not_change_a_bit():
    environment = {**os.environ, "MKL_CBWR": "AUTO,STRICT"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {**dict.fromkeys(MODELS, []), "bfloat16": []}


def differences(settings: dict[str, Any], dtype: str) -> list[str]:
    """Which watched requests differ, and in what setting, from being alone."""
    import numpy as np
    import torch
    from embedded_parts import answer_of, ids_of, logprobs_of, run, submit

    from megarl.model.hf_config import HFConfig
    from megarl.rollout.embedded.decoder import Decoder
    from megarl.rollout.embedded.scheduler import Scheduler
    from megarl.rollout.embedded.weights import Weights

    hf = HFConfig.of({**COMMON, **settings})
    weights = Weights(hf, getattr(torch, dtype))
    source = torch.Generator().manual_seed(0)
    for view in weights.views.values():
        view.copy_(torch.randn(view.shape, generator=source) * 0.15 + (view.dim() == 1))
    weights.refresh()
    assert weights.fused_experts == (settings.get("num_experts") != 40)

    def body(length: int, **params: Any) -> dict[str, Any]:
        prompt = torch.randint(2, 99, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        return {"rid": f"{length}.", "input_ids": prompt, "sampling_params": {
            "max_new_tokens": 10, "n": 2, "sampling_seed": 10 * length, "ignore_eos": True, **params}}

    def scheduler(slots: int, prefix_tokens: int = 0) -> Scheduler:
        return Scheduler(Decoder(weights), slots, hf.eos_ids, None, "v0", prefix_tokens)

    def second_turn(engine: Scheduler, first: list[dict[str, Any]], length: int, wait: bool) -> Any:
        """Goes on from the first sample of a first turn, whose keys and values the engine has kept."""
        asked = body(length)
        asked["input_ids"] += [*ids_of(first[0]), *range(5, 12)]
        return run(engine, asked) if wait else submit(engine, asked)

    alone = {length: run(scheduler(64), body(length)) for length in WATCHED}
    next_alone = {}
    for length in WATCHED:
        engine = scheduler(64, 10_000)
        next_alone[length] = second_turn(engine, run(engine, body(length)), length, wait=True)
        assert next_alone[length][0]["meta_info"]["cached_tokens"] == length + 9
    found = []
    for slots in (20, 64):
        crowd, random = scheduler(slots, 10_000), np.random.default_rng(slots)
        watched, others = {}, 0
        for length in random.permutation(WATCHED).tolist():
            for _ in range(6):
                submit(crowd, body(700 if others == 3 else int(random.integers(1, 60)), n=1, sampling_seed=others,
                                   max_new_tokens=int(random.integers(1, 20)), temperature=0.5, top_p=0.9))
                others += 1
            watched[length] = submit(crowd, body(length))
            for _ in range(int(random.integers(1, 4))):
                crowd.step()
        while crowd.step():
            pass
        later = {length: second_turn(crowd, answer_of(generate), length, wait=False)
                 for length, generate in watched.items()}
        while crowd.step():
            pass
        for length, generate in watched.items():
            for kind, one, other in (*(("", *pair) for pair in zip(alone[length], answer_of(generate), strict=True)),
                                     *((" later", *pair) for pair in zip(next_alone[length], answer_of(later[length]),
                                                                         strict=True))):
                if ids_of(one) != ids_of(other):
                    found.append(f"{length}{kind} among {slots}: other tokens")
                elif logprobs_of(one) != logprobs_of(other):
                    found.append(f"{length}{kind} among {slots}: other log-probs")
    return found


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(root), str(root.parent)]
    import torch

    torch.set_num_threads(1)
    result = {name: differences(settings, "float32") for name, settings in MODELS.items()}
    print(json.dumps({**result, "bfloat16": differences(MODELS["fused experts"], "bfloat16")}))
