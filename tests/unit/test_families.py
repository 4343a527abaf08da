"""Name tables, cutting and fusing, and the files of a checkpoint."""

import json
from pathlib import Path

import models
import pytest
import torch
from safetensors.torch import save_file

from megarl.checkpoint import shares
from megarl.checkpoint.safetensors_dir import SafetensorsDir
from megarl.config.stages import Part
from megarl.errors import UserMistake
from megarl.model.families import tables
from megarl.model.families.tables import Entry, HFTensor
from megarl.model.hf_config import HFConfig


def config_of(name: str, **changes: object) -> HFConfig:
    return HFConfig.of({**models.COMMON, **models.FAMILIES[name], **changes})


@pytest.mark.parametrize("name", models.FAMILIES)
def test_names_and_shapes_are_those_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    models.save_hf_model(name, tmp_path)
    checkpoint = SafetensorsDir(tmp_path)
    wanted = {tensor.name: tensor.shape for tensor in tables.hf_tensors(HFConfig.read(tmp_path))}
    assert set(wanted) == set(checkpoint.files)
    for key, shape in wanted.items():
        assert checkpoint.read(key, shape).shape == shape


def test_both_implementations_cover_the_same_tensors() -> None:
    for name in models.FAMILIES:
        hf = config_of(name)
        local, te = (tables.table(hf, kind) for kind in ("local", "transformer_engine"))
        for part in ("embedding", "layer", "norm", "head"):
            assert [(e.hf, e.kind, e.expert) for e in getattr(local, part)] == [
                (e.hf, e.kind, e.expert) for e in getattr(te, part)]
    moe = {e.megatron for e in tables.table(config_of("qwen3_moe"), "transformer_engine").layer}
    assert "decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}" in moe  # TEGroupedMLP
    assert "decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight" in moe
    dense = {e.megatron for e in tables.table(config_of("qwen3"), "transformer_engine").layer}
    assert "decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight" in dense


def test_names_of_latent_attention_with_transformer_engine() -> None:
    """It fuses the latent vectors' norms into the linears after them."""
    table = {e.megatron.split("self_attention.")[1]: e.kind for e in tables.table(
        config_of("deepseek_v3"), "transformer_engine").layer if "self_attention" in e.megatron}
    assert table == {
        "linear_q_down_proj.weight": "replicated", "linear_q_up_proj.layer_norm_weight": "replicated",
        "linear_q_up_proj.weight": "column", "linear_kv_down_proj.weight": "replicated",
        "linear_kv_up_proj.layer_norm_weight": "replicated", "linear_kv_up_proj.weight": "column",
        "linear_proj.weight": "row"}


def test_yarn_is_that_of_transformers() -> None:
    """Frequencies of the published DeepSeek-V3, and of the tiny one, whose ramp lies within them."""
    from test_hf_config import DEEPSEEK_V3
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from megarl.model import rope

    assert rope.softmax_factor(HFConfig.of(DEEPSEEK_V3)) == pytest.approx(1.8739, abs=1e-4)  # (0.1 ln 40 + 1)^2
    for raw in (DEEPSEEK_V3, {**models.COMMON, **models.FAMILIES["deepseek_v3"]}):
        wanted, scale = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.for_model(**raw))
        found = rope.inverse_frequencies(HFConfig.of(raw))
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
        plain = HFConfig.of(raw).rope_theta ** (-torch.arange(len(found)) / len(found))
        assert scale == 1 and (found < 0.99 * plain).any() and (found > 0.99 * plain).any()


def test_layers_behind_the_last_one_are_beside() -> None:
    for name in ("deepseek_v3", "glm4_moe"):
        hf = config_of(name)
        assert tables.is_beside("model.layers.4.eh_proj.weight", hf)
        assert not tables.is_beside("model.layers.3.eh_proj.weight", hf)
        assert not tables.is_beside("model.norm.weight", hf)
    assert not tables.is_beside("model.layers.4.eh_proj.weight", config_of("llama"))


def test_qkv_by_hand() -> None:
    """4 heads in 2 groups of head size 1: rows go q0 q1 k0 v0 | q2 q3 k1 v1."""
    hf = config_of("llama", hidden_size=2, num_attention_heads=4, num_key_value_heads=2, head_dim=1)
    entry = Entry("x", tuple(HFTensor(n, (s, 1)) for n, s in (("q", 4), ("k", 2), ("v", 2))), "qkv")
    q, k, v = torch.tensor([[0.], [1], [2], [3]]), torch.tensor([[10.], [11]]), torch.tensor([[20.], [21]])
    whole = shares.fuse(entry, [q, k, v], hf)
    assert whole.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    ranks = [shares.fuse(entry, [x[slice(*shares.cut(entry, i, rank, 2, 0)[1:])] for i, x in enumerate((q, k, v))], hf)
             for rank in range(2)]
    assert torch.equal(torch.cat(ranks), whole)
    for got, wanted in zip(shares.join(entry, ranks, hf), (q, k, v), strict=True):
        assert torch.equal(got, wanted)


def test_heads_that_do_not_divide_are_padded() -> None:
    """6 heads in 3 groups on 2 ranks: the second rank has group 2 and an empty group; on 5 ranks nobody is without."""
    hf = config_of("llama", hidden_size=2, num_attention_heads=6, num_key_value_heads=3, head_dim=1)
    qkv = Entry("x", tuple(HFTensor(n, (s, 1)) for n, s in (("q", 6), ("k", 3), ("v", 3))), "qkv", groups=3)
    assert [shares.cut(qkv, i, r, 2, 0)[1:] for r in range(2) for i in range(3)] == [
        (0, 4), (0, 2), (0, 2), (4, 6), (2, 3), (2, 3)]
    whole = [torch.arange(6.)[:, None], 10 + torch.arange(3.)[:, None], 20 + torch.arange(3.)[:, None]]
    second = shares.fuse(qkv, [whole[0][4:], whole[1][2:], whole[2][2:]], hf)
    assert second.flatten().tolist() == [4, 5, 12, 22]
    first = torch.tensor([0., 1, 10, 20, 2, 3, 11, 21])[:, None]
    joined = shares.join(qkv, [first, torch.cat((second, torch.zeros(4, 1)))], hf)
    assert all(map(torch.equal, joined, whole))
    output = Entry("x", (HFTensor("o", (1, 6)),), "row", groups=3)
    assert [shares.cut(output, 0, r, 2, 0) for r in range(2)] == [(1, 0, 4), (1, 4, 6)]
    five = Entry("x", tuple(HFTensor(n, (s, 1)) for n, s in (("q", 10), ("k", 5), ("v", 5))), "qkv", groups=5)
    assert shares.cut(five, 1, 3, 4, 0) == (0, 5, 5)  # ranks have 2, 2, 1 and 0 of 5 groups
    assert shares.fuse(five, [torch.empty(0, 1)] * 3, hf).shape == (0, 1)


def test_gate_up_row_and_vocab_by_hand() -> None:
    hf = config_of("llama", vocab_size=5)
    gate_up = Entry("x", (HFTensor("g", (4, 1)), HFTensor("u", (4, 1))), "gate_up")
    gate, up = torch.arange(4.)[:, None], 10 + torch.arange(4.)[:, None]
    ranks = [shares.fuse(gate_up, [gate[2 * r: 2 * r + 2], up[2 * r: 2 * r + 2]], hf) for r in range(2)]
    assert ranks[1].flatten().tolist() == [2, 3, 12, 13]
    assert all(map(torch.equal, shares.join(gate_up, ranks, hf), (gate, up)))
    row = Entry("x", (HFTensor("d", (3, 4)),), "row")
    assert shares.cut(row, 0, 1, 2, 0) == (1, 2, 4)
    vocab = Entry("x", (HFTensor("e", (5, 1)),), "vocab")
    assert [shares.cut(vocab, 0, r, 4, 8) for r in range(4)] == [(0, 0, 2), (0, 2, 4), (0, 4, 5), (0, 5, 5)]
    padded = [torch.tensor([[0.], [1]]), torch.tensor([[2.], [3]]), torch.tensor([[4.], [0]]), torch.zeros(2, 1)]
    assert shares.join(vocab, padded, hf)[0].flatten().tolist() == [0, 1, 2, 3, 4]


def test_a_stage_has_its_layers_and_a_tied_copy() -> None:
    hf = config_of("llama_tied")
    last = list(shares.parameters(tables.table(hf), hf, Part(1, 2, 2, 2), 1))
    assert {p.first_layer + p.layer for p in last if "layers" in p.entry.megatron} == {2, 3}
    assert [p.hf_names() for p in last if shares.is_copy(p, hf)] == [["model.embed_tokens.weight"]]
    assert not any(shares.is_copy(p, hf) for p in shares.parameters(tables.table(hf), hf, Part(0, 2, 0, 2), 1))


def test_bad_checkpoints_are_named(tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(UserMistake) as error:
            checkpoint = SafetensorsDir(path)
            checkpoint.refuse_unknown(hf)
            for tensor in tables.hf_tensors(hf):
                checkpoint.read(tensor.name, tensor.shape)
        return str(error.value)

    hf = config_of("llama")
    assert "neither" in refused(tmp_path)
    models.save_hf_model("llama", tmp_path / "ok", max_shard_size="60KB")
    index = json.loads((tmp_path / "ok/model.safetensors.index.json").read_text())
    shard = tmp_path / "ok" / index["weight_map"]["model.layers.3.mlp.up_proj.weight"]
    content = shard.read_bytes()
    shard.unlink()
    assert shard.name in (message := refused(tmp_path / "ok")) and "the file is missing; tensor model." in message
    shard.write_bytes(content[:1000])
    assert "damaged" in refused(tmp_path / "ok")
    shard.write_bytes(content)
    whole = {name: torch.zeros(tensor.shape) for tensor in tables.hf_tensors(hf) for name in [tensor.name]}
    for change, message in [
            (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
            (lambda t: t.update({"lm_head.weight": torch.zeros(98, 32)}), r"lm_head.weight is (98, 32)"),
            (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}), "has no place"),
            (lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}), "stored as I8")]:
        changed = dict(whole)
        change(changed)
        save_file(changed, tmp_path / "model.safetensors")
        assert message in refused(tmp_path)
