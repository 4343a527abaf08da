"""A Hugging Face `config.json`, read into the fields that megarl uses. Pure: json only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from megarl.errors import UserMistake
from megarl.model import families


@dataclass(frozen=True)
class RopeScaling:
    """The frequency scaling of Llama 3.1 (config.json: rope_type "llama3"); lengths in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071) as DeepSeek-V3 has it; lengths in tokens.

    `mscale` makes the softmax sharper: its scale is multiplied by (0.1 mscale ln(factor) + 1)^2.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    mscale: float


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, sec. 2.1).

    Attributes:
        q_rank: of queries' latent vector; 0: queries have none.
        kv_rank: of the latent vector of keys and values.
        plain, rotated, value: of a head: dimensions of q and k without and with a position, and of v.
    """

    NORM_EPS: ClassVar[float] = 1e-6  # of latent vectors, whatever rms_norm_eps says (as DeepSeek's own code)

    q_rank: int
    kv_rank: int
    plain: int
    rotated: int
    value: int


@dataclass(frozen=True)
class HFConfig:
    """What a decoder of one of the known families needs.

    Attributes:
        family: the `model_type` of config.json.
        hidden, layers, heads, kv_heads, head_dim, vocab: sizes; `vocab` is unpadded.
        ffn: inner size of a dense layer's MLP.
        tied: input and output embeddings are one parameter.
        norm_eps: of every RMSNorm.
        rope_theta, rope_scaling: rotary embedding; scaling is None, Llama 3.1's or YaRN.
        qkv_bias, qk_norm: of the attention.
        experts, top_k, moe_ffn, norm_topk: of a MoE model; experts is 0 for a dense one. `norm_topk`: the chosen
            experts' weights are normalised to sum to 1.
        dense_layers: so many first layers of a MoE model have an MLP of `ffn` and no experts.
        shared_ffn: inner size of the expert that all tokens take; 0 if there is none.
        router_bias: experts are scored by sigmoid, and chosen by score plus a bias that is no parameter.
        router_groups, groups_taken: experts are chosen from the best groups of them; 1 if there are no groups.
        route_scale: factor of the chosen experts' weights.
        rotated: fraction of each head that is rotated, its first dimensions.
        latent: of multi-head latent attention; None for grouped queries. `head_dim` is then that of q and k, and there
            are as many kv_heads as heads.
        dtype: what the checkpoint's config names ("bfloat16", "float32", ...).
        max_positions: longest sequence the model was made for, tokens.
        eos_ids: end-of-sequence token ids, of config.json and generation_config.json.
        raw: config.json as it is.
        path: the directory it came from.
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | Yarn | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    top_k: int = 0
    moe_ffn: int = 0
    norm_topk: bool = True
    dense_layers: int = 0
    shared_ffn: int = 0
    router_bias: bool = False
    router_groups: int = 1
    groups_taken: int = 1
    route_scale: float = 1.0
    rotated: float = 1.0
    latent: Latent | None = None
    dtype: str = "float32"
    max_positions: int = 2048
    eos_ids: tuple[int, ...] = ()
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    path: str = ""

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts."""
        return tuple(range(self.dense_layers, self.layers)) if self.experts else ()

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.latent.rotated if self.latent else int(self.head_dim * self.rotated)

    @property
    def beside_ffns(self) -> tuple[int, ...]:
        """Inner sizes of a MoE model's MLPs that are no routed experts: of dense layers and of the shared expert."""
        dense = (self.ffn,) if self.dense_layers else ()
        return (*dense, self.shared_ffn) if self.shared_ffn else dense

    @classmethod
    def read(cls, path: str | Path) -> HFConfig:
        """Read `path`/config.json (and generation_config.json where there is one).

        Raises:
            UserMistake: no such file, not JSON, an unknown family, or a feature that megarl would train wrongly.
        """
        directory = Path(path)
        raw = _json(directory / "config.json")
        generation = directory / "generation_config.json"
        try:
            return cls.of(raw, _json(generation) if generation.exists() else {}, str(directory))
        except (TypeError, ValueError, AttributeError) as error:
            raise UserMistake(f"a value is not of the kind that it should be: {error}", str(directory / "config.json"),
                              "restore the file from its source") from error

    @classmethod
    def of(cls, raw: dict[str, Any], generation: dict[str, Any] | None = None, path: str = "") -> HFConfig:
        """The same from parsed JSON; `path` is used in messages."""
        where = f"{path}/config.json" if path else "config.json"
        name = raw.get("model_type")
        if name not in families.FAMILIES:
            raise UserMistake(f"model family {name!r} is not known", f"{where}: model_type",
                              f"known families: {', '.join(sorted(families.FAMILIES))}")
        family = families.FAMILIES[name]
        _refuse_unsupported(raw, where, family.HANDLES)
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
            if not isinstance(raw.get(key), int) or raw[key] < 1:
                raise UserMistake(f"{key} is {raw.get(key)!r}", where, "give a positive integer")
        theta, scaling = _rope(raw, where, family.HANDLES)
        heads = raw["num_attention_heads"]
        values = dict(
            family=name, hidden=raw["hidden_size"], layers=raw["num_hidden_layers"], heads=heads,
            kv_heads=raw.get("num_key_value_heads") or family.KV_HEADS or heads,
            head_dim=raw.get("head_dim") or family.HEAD_DIM or raw["hidden_size"] // heads,
            ffn=raw["intermediate_size"], vocab=raw["vocab_size"],
            tied=bool(raw.get("tie_word_embeddings", False)), norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=theta, rope_scaling=scaling,
            dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
            max_positions=raw.get("max_position_embeddings", family.MAX_POSITIONS),
            eos_ids=_eos_ids(raw, generation or {}), raw=raw, path=path, qkv_bias=family.QKV_BIAS,
            qk_norm=family.QK_NORM)
        return cls(**values | family.sizes(raw, where))


def _json(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise UserMistake("there is no such file", str(path),
                          "model.path must be a directory with a Hugging Face checkpoint") from None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserMistake(f"not JSON: {error}", str(path), "restore the file from its source") from None
    if not isinstance(found, dict):
        raise UserMistake("not a JSON object", str(path), "restore the file from its source")
    return found


def _refuse_unsupported(raw: dict[str, Any], where: str, handled: Sequence[str]) -> None:
    """Features that change the mathematics and that megarl does not have, or has in families that handle them only."""
    def refuse(key: str, remedy: str) -> None:
        raise UserMistake(f"{key} {raw[key]!r} is not supported", f"{where}: {key}", remedy)

    if raw.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", "use a checkpoint with silu")
    if raw.get("use_sliding_window"):
        refuse("use_sliding_window", "sliding windows are not in; use a checkpoint with full attention")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        refuse("layer_types", "only full_attention layers are in")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key) and key not in handled:
            refuse(key, "use a checkpoint without it")
    for key in ("attention_dropout", "hidden_dropout"):
        if raw.get(key):
            refuse(key, "set it to 0")
    if raw.get("pretraining_tp", 1) != 1:
        refuse("pretraining_tp", "set it to 1")
    if raw.get("quantization_config"):
        refuse("quantization_config", "use the unquantised checkpoint")


def _rope(raw: dict[str, Any], where: str, handled: Sequence[str]) -> tuple[float, RopeScaling | Yarn | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(key) or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0) and "partial_rotary_factor" not in handled:
        raise UserMistake(f"partial_rotary_factor {partial} is not supported", f"{where}: {key}",
                          "use a checkpoint that rotates whole heads")
    if kind == "default":
        return theta, None
    if kind not in ("llama3", "yarn") or (kind == "yarn" and "yarn" not in handled):
        known = "default, llama3" + (", yarn" if "yarn" in handled else "")
        raise UserMistake(f"rope scaling {kind!r} is not supported", f"{where}: {key}", f"known: {known}")
    try:
        if kind == "yarn":
            return theta, _yarn(rope, f"{where}: {key}")
        scaling = RopeScaling(float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"]),
                              int(rope["original_max_position_embeddings"]))
    except KeyError as missing:
        raise UserMistake(f"{missing.args[0]} is missing", f"{where}: {key}", f"{kind} scaling needs it") from None
    return theta, scaling


def _yarn(rope: dict[str, Any], where: str) -> Yarn:
    """YaRN with one mscale for both of its uses, so that cosines and sines are not scaled."""
    mscale = float(rope.get("mscale") or 0)
    if not mscale or mscale != float(rope.get("mscale_all_dim") or 0) or rope.get("attention_factor") is not None:
        raise UserMistake("only yarn with equal mscale and mscale_all_dim, and without attention_factor, is in", where,
                          "use a checkpoint of DeepSeek-V3's kind")
    if float(rope["factor"]) < 1:
        raise UserMistake(f"factor {rope['factor']} is below 1", where, "yarn stretches a context")
    return Yarn(float(rope["factor"]), float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1),
                int(rope["original_max_position_embeddings"]), mscale)


def _eos_ids(raw: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    found: list[int] = []
    for value in (generation.get("eos_token_id"), raw.get("eos_token_id")):
        found += [value] if isinstance(value, int) else list(value or ())
    return tuple(dict.fromkeys(found))
