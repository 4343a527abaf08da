"""Model families: for each, what its config.json means and how its tensors are named, cut and fused.

A family module has: `KV_HEADS`, `HEAD_DIM`, `MAX_POSITIONS` (what its config.json means where it says nothing; None:
follows from other fields), `QKV_BIAS`, `QK_NORM`, `HANDLES` (keys that others refuse and its `sizes` reads),
`sizes(raw, where)` (fields of HFConfig of its own; raises UserMistake) and `table(hf, implementation)` (see `tables`);
perhaps `MLP`, what it calls the MLP of a layer with experts, and `ignored(name, hf)`, tensors of a checkpoint that are
not trained. Pure: no megatron, no torch.distributed.
"""

from megarl.model.families import deepseek_v3, glm4_moe, llama, mixtral, qwen2, qwen3, qwen3_moe

FAMILIES = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "qwen3_moe": qwen3_moe,
            "mixtral": mixtral, "glm4_moe": glm4_moe, "deepseek_v3": deepseek_v3}
