"""Name tables: which Hugging Face tensors make up each Megatron parameter, and how they are cut and fused.

One table serves import, export and publishing; the embedded engine uses its Hugging Face side. Names are patterns:
`{layer}` and `{expert}` stand for the model's numbers in Hugging Face names and for this stage's and this rank's own
(local) numbers in Megatron names.

Kinds (tp = tensor-parallel degree; for experts, their own degree):
    replicated  one tensor, whole on each rank.
    vocab       rows padded to a multiple of tp, then cut into tp blocks of rows.
    column      cut into tp blocks of rows (the output side of a column-parallel linear).
    row         cut into tp blocks of columns (the input side of a row-parallel linear).
    qkv         q, k and v rows interleaved by key/value head: [q heads of group 0, k 0, v 0, q heads of group 1, ...],
                cut by groups.
    gate_up     each of gate and up cut into tp blocks of rows; a rank has its gate block above its up block.
In every kind a rank's share of each Hugging Face tensor is one contiguous slice of one dimension.

Key/value heads that tp does not divide are padded with empty groups at the end (`padded_groups`): their q, k, v rows
and output columns are 0, so they add nothing and get a gradient of exactly 0. Checkpoints and engines never see them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from megarl.model.hf_config import HFConfig

Implementation = Literal["local", "transformer_engine"]
Kind = Literal["replicated", "vocab", "column", "row", "qkv", "gate_up"]

# The dimension along which a kind is cut into tensor-parallel shares; None: not cut.
CUT_DIM: dict[Kind, int | None] = {"replicated": None, "vocab": 0, "column": 0, "row": 1, "qkv": 0,
                                     "gate_up": 0}


@dataclass(frozen=True)
class HFTensor:
    """A Hugging Face tensor: name pattern and whole shape."""

    name: str
    shape: tuple[int, ...]

    def at(self, layer: int = 0, expert: int = 0) -> str:
        """The name with numbers filled in (the model's own, counted over all stages and ranks)."""
        return self.name.format(layer=layer, expert=expert)


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the Hugging Face tensors that it is made of, in order of fusion.

    `groups`: key/value heads along the dimension that is cut; 0 if it is not made of heads.
    """

    megatron: str
    hf: tuple[HFTensor, ...]
    kind: Kind
    expert: bool = False
    groups: int = 0

    def at(self, layer: int = 0, expert: int = 0) -> str:
        """Megatron's name with local numbers filled in."""
        return self.megatron.format(layer=layer, expert=expert)


@dataclass(frozen=True)
class Table:
    """All parameters of a family: before, in and after the layers. `head` is empty when embeddings are tied.

    The first `dense_layers` layers of a MoE model may be `dense` ones, the others are `layer`s.
    """

    embedding: tuple[Entry, ...]
    layer: tuple[Entry, ...]
    norm: tuple[Entry, ...]
    head: tuple[Entry, ...]
    dense: tuple[Entry, ...] = ()
    dense_layers: int = 0

    def entries(self, layer: int) -> tuple[Entry, ...]:
        """Those of the model's layer `layer`."""
        return self.dense if layer < self.dense_layers else self.layer


def padded_groups(kv_heads: int, tp_size: int) -> int:
    """Groups of attention heads (one per key/value head) in the Megatron model: a multiple of `tp_size`."""
    return -(-kv_heads // tp_size) * tp_size


def table(hf: HFConfig, implementation: Implementation = "local") -> Table:
    """The table of the family of `hf`."""
    from megarl.model.families import FAMILIES

    return FAMILIES[hf.family].table(hf, implementation)


def hf_tensors(hf: HFConfig) -> Iterator[HFTensor]:
    """Every tensor of the Hugging Face checkpoint, with numbers filled in, in the model's order."""
    whole = table(hf)
    for entry in whole.embedding:
        yield from entry.hf
    for layer in range(hf.layers):
        for entry in whole.entries(layer):
            for expert in range(hf.experts if entry.expert else 1):
                for tensor in entry.hf:
                    yield HFTensor(tensor.at(layer, expert), tensor.shape)
    for entry in (*whole.norm, *whole.head):
        yield from entry.hf


def is_beside(name: str, hf: HFConfig) -> bool:
    """Whether a Hugging Face tensor may be in a checkpoint and is left out of training (layers after the last one)."""
    from megarl.model.families import FAMILIES

    ignored = getattr(FAMILIES[hf.family], "ignored", None)
    return ignored is not None and ignored(name, hf)


def is_behind_the_layers(name: str, hf: HFConfig) -> bool:
    """Whether a Hugging Face tensor is of a layer after the model's last one (multi-token prediction)."""
    parts = name.split(".")
    return parts[:2] == ["model", "layers"] and parts[2].isdigit() and int(parts[2]) >= hf.layers


def is_buffer(name: str) -> bool:
    """Whether a Hugging Face tensor is no parameter: no gradient trains it, and it is not rounded with the weights."""
    return name.endswith(".e_score_correction_bias")


# The parts that the Llama-like families share.

def decoder(hf: HFConfig, implementation: Implementation, mlp: tuple[Entry, ...],
            dense: tuple[Entry, ...] = ()) -> Table:
    """A pre-norm decoder around the given MLP entries, with `dense` ones in dense layers."""
    embedding = HFTensor("model.embed_tokens.weight", (hf.vocab, hf.hidden))
    head = HFTensor("lm_head.weight", (hf.vocab, hf.hidden))
    around = (latent_attention if hf.latent else attention)(hf, implementation)
    return Table(
        embedding=(Entry("embedding.word_embeddings.weight", (embedding,), "vocab"),),
        layer=around + mlp, dense=around + dense, dense_layers=hf.dense_layers,
        norm=(Entry("decoder.final_layernorm.weight", (HFTensor("model.norm.weight", (hf.hidden,)),), "replicated"),),
        head=() if hf.tied else (Entry("output_layer.weight", (head,), "vocab"),))


def _vector(megatron: str, name: str, size: int) -> Entry:
    return Entry(f"decoder.layers.{{layer}}.{megatron}", (HFTensor(f"model.layers.{{layer}}.{name}", (size,)),),
                 "replicated")


def attention(hf: HFConfig, implementation: Implementation) -> tuple[Entry, ...]:
    """Input norm, q/k/v, optional q and k norms, output projection. TE fuses the norm into the q/k/v linear."""
    at, to = "model.layers.{layer}.self_attn", "decoder.layers.{layer}.self_attention"
    q, kv = hf.heads * hf.head_dim, hf.kv_heads * hf.head_dim
    sizes = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    norm = "self_attention.linear_qkv.layer_norm_weight" if implementation == "transformer_engine" else (
        "input_layernorm.weight")
    entries = [
        _vector(norm, "input_layernorm.weight", hf.hidden),
        Entry(f"{to}.linear_qkv.weight", tuple(HFTensor(f"{at}.{n}.weight", (s, hf.hidden)) for n, s in sizes), "qkv",
              groups=hf.kv_heads)]
    if hf.qkv_bias:
        entries.append(Entry(f"{to}.linear_qkv.bias", tuple(HFTensor(f"{at}.{n}.bias", (s,)) for n, s in sizes), "qkv",
                             groups=hf.kv_heads))
    if hf.qk_norm:
        entries += [_vector("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", hf.head_dim),
                    _vector("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", hf.head_dim)]
    entries.append(Entry(f"{to}.linear_proj.weight", (HFTensor(f"{at}.o_proj.weight", (hf.hidden, q)),), "row",
                         groups=hf.kv_heads))
    return tuple(entries)


def dense_mlp(hf: HFConfig, implementation: Implementation) -> tuple[Entry, ...]:
    """Norm and gated MLP. TE fuses the norm into the first linear."""
    at, to = "model.layers.{layer}.mlp", "decoder.layers.{layer}.mlp"
    norm = "mlp.linear_fc1.layer_norm_weight" if implementation == "transformer_engine" else (
        "pre_mlp_layernorm.weight")
    return (_vector(norm, "post_attention_layernorm.weight", hf.hidden),
            *gated(f"{to}.linear_fc1.weight", f"{to}.linear_fc2.weight", at, hf.hidden, hf.ffn))


@dataclass(frozen=True)
class MLPNames:
    """What a family calls the MLP of a layer with experts and an expert's three matrices."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def moe_names(hf: HFConfig) -> MLPNames:
    """The family's names of them."""
    from megarl.model.families import FAMILIES

    return getattr(FAMILIES[hf.family], "MLP", MLPNames())


def moe_mlp(hf: HFConfig, implementation: Implementation) -> tuple[Entry, ...]:
    """Norm, router, perhaps its bias and a shared expert, and experts. TE has one grouped linear whose parameters are
    numbered by expert."""
    names = moe_names(hf)
    at, to = f"model.layers.{{layer}}.{names.block}", "decoder.layers.{layer}.mlp"
    fc1, fc2 = ((f"{to}.experts.linear_fc1.weight{{expert}}", f"{to}.experts.linear_fc2.weight{{expert}}")
                if implementation == "transformer_engine" else
                (f"{to}.experts.local_experts.{{expert}}.linear_fc1.weight",
                 f"{to}.experts.local_experts.{{expert}}.linear_fc2.weight"))
    bias = (_vector("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", hf.experts),)
    shared = gated(f"{to}.shared_experts.linear_fc1.weight", f"{to}.shared_experts.linear_fc2.weight",
                   f"{at}.shared_experts", hf.hidden, hf.shared_ffn)
    return (_vector("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", hf.hidden),
            Entry(f"{to}.router.weight", (HFTensor(f"{at}.gate.weight", (hf.experts, hf.hidden)),), "replicated"),
            *(bias if hf.router_bias else ()), *(shared if hf.shared_ffn else ()),
            *gated(fc1, fc2, f"{at}.experts.{{expert}}", hf.hidden, hf.moe_ffn, expert=True, names=names))


def gated(fc1: str, fc2: str, at: str, hidden: int, ffn: int, expert: bool = False,
          names: MLPNames = MLPNames()) -> tuple[Entry, Entry]:
    """The two linears of a gated MLP."""
    gate, up = (HFTensor(f"{at}.{name}.weight", (ffn, hidden)) for name in (names.gate, names.up))
    return (Entry(fc1, (gate, up), "gate_up", expert),
            Entry(fc2, (HFTensor(f"{at}.{names.down}.weight", (hidden, ffn)),), "row", expert))


def latent_attention(hf: HFConfig, implementation: Implementation) -> tuple[Entry, ...]:
    """Input norm, latent vectors with their norms, what is made of them, output projection.

    Heads are not fused, so a share is a block of rows. TE fuses the latent vectors' norms into the linears after them.
    """
    sizes, at, to = hf.latent, "model.layers.{layer}.self_attn", "decoder.layers.{layer}.self_attention"
    fused = implementation == "transformer_engine"

    def linear(megatron: str, name: str, rows: int, columns: int, kind: Kind) -> Entry:
        return Entry(f"{to}.{megatron}.weight", (HFTensor(f"{at}.{name}.weight", (rows, columns)),), kind)

    def norm(megatron: str, into: str, name: str, size: int) -> Entry:
        return _vector(f"self_attention.{f'{into}.layer_norm_weight' if fused else f'{megatron}.weight'}",
                       f"self_attn.{name}.weight", size)

    q, kv = hf.heads * hf.head_dim, hf.heads * (sizes.plain + sizes.value)
    queries = ((linear("linear_q_down_proj", "q_a_proj", sizes.q_rank, hf.hidden, "replicated"),
                norm("q_layernorm", "linear_q_up_proj", "q_a_layernorm", sizes.q_rank),
                linear("linear_q_up_proj", "q_b_proj", q, sizes.q_rank, "column")) if sizes.q_rank else
               (linear("linear_q_proj", "q_proj", q, hf.hidden, "column"),))
    return (_vector("input_layernorm.weight", "input_layernorm.weight", hf.hidden), *queries,
            linear("linear_kv_down_proj", "kv_a_proj_with_mqa", sizes.kv_rank + sizes.rotated, hf.hidden, "replicated"),
            norm("kv_layernorm", "linear_kv_up_proj", "kv_a_layernorm", sizes.kv_rank),
            linear("linear_kv_up_proj", "kv_b_proj", kv, sizes.kv_rank, "column"),
            linear("linear_proj", "o_proj", hf.hidden, hf.heads * sizes.value, "row"))
