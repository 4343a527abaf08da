"""Which settings a resumed run may change: those that say where and how it computes, not what. Pure."""

from __future__ import annotations

# Of everything else a change alters what is learnt, and is refused unless checkpoint.allow_changes is set.
_FREE = (
    "run.require_apex", "cluster.", "parallel.", "pipeline.", "sync.", "checkpoint.", "eval.", "observe.", "debug.",
    "sglang.", "model.implementation", "model.recompute", "model.head_chunk_tokens", "optim.distributed",
    "batch.max_tokens", "batch.on_long_sequence", "guard.", "reward.workers", "reward.timeout_s", "rollout.")
_FIXED = (
    "rollout.samples_per_prompt", "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p",
    "rollout.max_response_tokens", "rollout.stop", "rollout.stop_token_ids", "rollout.max_lag", "rollout.ahead",
    "rollout.on_update")


def is_fixed(key: str) -> bool:
    """Whether a dotted config key must stay as it was when the run began."""
    return key in _FIXED or not any(key == free or (free.endswith(".") and key.startswith(free)) for free in _FREE)
