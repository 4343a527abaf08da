"""A small config that passes every check, with all the files it names; tests spoil one thing in it at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, FFN, VOCABULARY = 32, 2, 4, 2, 8, 4, 32, 32
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": FFN,
    "moe_intermediate_size": FFN, "num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False, "torch_dtype": "float32",
}
WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "sort", "=", *"0123456789"]


def good_tree(folder: Path) -> dict[str, Any]:
    """The config as plain values; its files are below `folder` once `write_files` has run."""
    return {
        "run": {"dir": str(folder / "run"), "steps": 2},
        "cluster": {"trainers": 2, "rollouts": 1, "device": "cpu"},
        "parallel": {"expert": 2},
        "model": {"path": str(folder / "model"), "implementation": "local", "dtype": "fp32"},
        "data": {"sources": [{"path": str(folder / "train.jsonl")}], "max_prompt_tokens": 16, "prompts_per_step": 4},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 8, "slots": 16},
        "reward": {"terms": [{"name": "exact"}]},
        "objective": {"algorithm": "gspo"},
        "batch": {"minibatches": 2, "max_tokens": 128},
        "optim": {"lr": 1e-4},
        "eval": {"every": 1, "sets": [{"path": str(folder / "heldout.jsonl"), "sampling": {"samples": 2},
                                       "pass_at": [1, 2]}]},
    }


def write_good(folder: Path) -> Path:
    """Write the config and its files; returns the path of the config."""
    write_files(folder)
    return write_tree(folder, good_tree(folder))


def write_tree(folder: Path, tree: dict[str, Any]) -> Path:
    """Write plain values as `folder`/config.yaml."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def write_files(folder: Path, layers: int = LAYERS) -> None:
    """Model directory with two shards of random weights and a word tokenizer, training and held-out prompts."""
    rows = [{"prompt": f"sort {a} {b} =", "label": " ".join(sorted((a, b)))} for a in "0123456789" for b in "987"]
    for name, part in (("train", rows[:20]), ("heldout", rows[20:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": layers}))
    _write_weights(model, layers)
    _write_tokenizer(model)


def _write_weights(model: Path, layers: int) -> None:
    from safetensors.numpy import save_file

    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,),
              "lm_head.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.input_layernorm.weight": (HIDDEN,), f"{at}.post_attention_layernorm.weight": (HIDDEN,),
                   f"{at}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
                   f"{at}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
                   f"{at}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
                   f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
                   f"{at}.self_attn.q_norm.weight": (HEAD_DIM,), f"{at}.self_attn.k_norm.weight": (HEAD_DIM,),
                   f"{at}.mlp.gate.weight": (EXPERTS, HIDDEN)}
        for expert in range(EXPERTS):
            shapes |= {f"{at}.mlp.experts.{expert}.{name}.weight": shape for name, shape in (
                ("gate_proj", (FFN, HIDDEN)), ("up_proj", (FFN, HIDDEN)), ("down_proj", (HIDDEN, FFN)))}
    rng = np.random.default_rng(0)
    tensors = {name: np.ones(shape, np.float32) if "norm" in name else
               rng.normal(0, 0.05, shape).astype(np.float32) for name, shape in shapes.items()}
    files = {name: f"model-0000{1 + (number >= len(tensors) // 2)}-of-00002.safetensors"
             for number, name in enumerate(tensors)}
    for file in sorted(set(files.values())):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, model / file, {"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": files}))


def _write_tokenizer(model: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    words.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "bos_token": "<bos>",
         "eos_token": "<eos>", "unk_token": "<unk>", "clean_up_tokenization_spaces": False}))
