"""The configs that come with megarl: they load, their layouts fit their models, their memory adds up."""

import re
from pathlib import Path

import pytest

from megarl.config.check import load_checked
from megarl.config.layout import Layout, check_model
from megarl.config.load import load

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GPU = 80.0  # 1e9 bytes
VOCABULARY = 151936
# hidden, layers, heads, kv heads, experts, ffn (of one expert), tied; parameters as published, in billions
MODELS = {"qwen3_4b": (2560, 36, 32, 8, 0, 9728, True, 4.0), "qwen3_30b_a3b": (2048, 48, 32, 4, 128, 768, False, 30.5),
          "qwen3_235b_a22b": (4096, 94, 64, 4, 128, 1536, False, 235)}


def test_every_recipe_is_known():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_layout_and_memory(name):
    hidden, layers, heads, kv_heads, experts, ffn, tied, billions = MODELS[name]
    text = (CONFIGS / f"{name}.yaml").read_text()
    config = load(CONFIGS / f"{name}.yaml")
    layout = Layout.from_config(config)
    check_model(layout, kv_heads=kv_heads, experts=experts, ffn=ffn)
    assert config.parallel.layers_per_stage == [layers // layout.stages] * layout.stages or layout.stages == 1
    assert config.rollout.max_response_tokens + config.data.max_prompt_tokens <= config.batch.max_tokens

    attention = 2 * hidden * 128 * (heads + kv_heads) + 2 * 128 + 2 * hidden
    in_experts = layers * experts * 3 * hidden * ffn
    rest = layers * (attention + (hidden * experts if experts else 3 * hidden * ffn)) + hidden
    embedding = VOCABULARY * hidden
    assert in_experts + rest + embedding * (1 if tied else 2) == pytest.approx(billions * 1e9, rel=0.006)

    ends = embedding * (1 if tied or layout.pipeline > 1 else 2)  # the embeddings of the fuller stage
    expert_share = in_experts / layout.pipeline / layout.expert
    share = (rest / layout.pipeline + ends) / layout.tensor
    states = 6 * (expert_share + share) + 12 * (
        expert_share / layout.expert_data + share / (layout.data * layout.context))
    assert re.search(r"^#   states += +(\S+) GB$", text, re.M).group(1) == f"{states / 1e9:.1f}"

    tokens = config.batch.max_tokens / layout.context
    kept = layers * tokens / layout.tensor * hidden * 2  # layers / pipeline, of `pipeline` micro-batches in flight
    rows = tokens / layout.tensor * 8
    layer = tokens * 128 * 2 * (heads + kv_heads) / layout.tensor * 4 + (
        rows * 2 * (8 * hidden + 6 * ffn) if experts else tokens * 12 * ffn / layout.tensor)
    head = (3 * config.model.head_chunk_tokens * 4 + hidden * 10) * VOCABULARY / layout.tensor  # chunks, gradient
    total = (states + kept + layer + head) / 1e9
    assert f"#   total {total:.1f} GB;" in text
    assert total < 0.8 * GPU


@pytest.mark.parametrize("name, experts, layers", [("gspo_moe", 8, 2), ("grpo_dense", 0, 2)])
def test_tiny_recipes_pass_the_check(name, experts, layers, tmp_path, monkeypatch):
    from megarl.examples.warm_start import Options, make

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    folder = Path("runs") / ("sort-task" if experts else "sort-task-dense")
    make(folder, Options(layers=layers, experts=experts, steps=1, batch=2, train_prompts=32, heldout_prompts=8))
    config, report = load_checked(CONFIGS / "tiny" / f"{name}.yaml")
    assert report.notes == []
    assert config.batch.minibatches > 1 and config.eval.before_start
