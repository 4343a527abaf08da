"""A Hugging Face config and a layout -> Megatron-core GPTModel chunks, one per pipeline stage held by this rank."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megarl.cluster import device
from megarl.cluster.groups import coordinates
from megarl.config import moe, options, stages
from megarl.config.layout import Layout, check_model
from megarl.config.schema import Config
from megarl.config.stages import Part
from megarl.errors import UserMistake
from megarl.model import megatron_fixes
from megarl.model.chunk import PolicyChunk
from megarl.model.families.tables import padded_groups
from megarl.model.hf_config import HFConfig
from megarl.model.specs import block_spec
from megarl.pipeline.generators import SCHEDULES


def implementation(config: Config, hf: HFConfig) -> Literal["local", "transformer_engine"]:
    """What `model.implementation` means here; auto is Transformer Engine where it is installed and can run.

    Raises:
        UserMistake: Transformer Engine was asked for and cannot run here.
    """
    obstacle = ""
    if device.kind() == "cpu":
        obstacle = "needs a GPU"
    elif importlib.util.find_spec("transformer_engine") is None:
        obstacle = "is not installed"
    elif config.model.dtype != "bf16":
        obstacle = "has packed attention for model.dtype bf16 only"
    elif hf.latent is not None:
        obstacle = "was not tried with latent attention"
    asked = config.model.implementation
    if asked == "transformer_engine" and obstacle:
        raise UserMistake(f"transformer_engine was asked for but {obstacle}", "model.implementation",
                          "use auto or local; for transformer_engine: a GPU, the package, bf16, and grouped queries")
    return "local" if asked == "local" or obstacle else "transformer_engine"


def padded_vocab(hf: HFConfig, layout: Layout) -> int:
    """Rows of the embedding: the vocabulary up to a multiple of 8 rows per tensor-parallel rank."""
    unit = 8 * layout.tensor
    return math.ceil(hf.vocab / unit) * unit


def transformer_config(hf: HFConfig, config: Config, layout: Layout) -> TransformerConfig:
    """Megatron-core's config for this model, run and layout, with the user's `megatron:` options on top.

    `calculate_per_token_loss` makes Megatron's DDP sum gradients over ranks: megarl's losses carry their global
    divisors already. Weights are initialised although they are loaded afterwards: only then does Megatron-core mark
    those that are cut over tensor ranks, and without the mark the gradient norm leaves most of them out.

    Raises:
        UserMistake: the model cannot be cut so, or a `megatron:` option is unknown, decided elsewhere, or refused by
            Megatron-core.
    """
    check_model(layout, kv_heads=hf.kv_heads, experts=hf.experts, ffn=hf.moe_ffn if hf.experts else hf.ffn,
                beside=hf.beside_ffns, padded_heads=hf.latent is None)
    for mistake in options.check_megatron(config.megatron):
        raise mistake
    dtype = torch.bfloat16 if config.model.dtype == "bf16" else torch.float32
    with_te = implementation(config, hf) == "transformer_engine"
    for mistake in moe.check_packages(config, with_te, device.kind() != "cpu"):
        raise mistake
    groups = padded_groups(hf.kv_heads, layout.tensor)
    values: dict[str, Any] = dict(
        num_layers=hf.layers, hidden_size=hf.hidden, num_attention_heads=hf.heads // hf.kv_heads * groups,
        num_query_groups=groups, kv_channels=hf.head_dim, ffn_hidden_size=hf.ffn, normalization="RMSNorm",
        layernorm_epsilon=hf.norm_eps, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, add_qkv_bias=hf.qkv_bias, qk_layernorm=hf.qk_norm, hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor, pipeline_model_parallel_size=layout.stages,
        context_parallel_size=layout.context, sequence_parallel=layout.sequence, params_dtype=dtype,
        pipeline_dtype=dtype, bf16=dtype == torch.bfloat16, calculate_per_token_loss=True,
        use_cpu_initialization=device.kind() == "cpu",
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, apply_rope_fusion=with_te)
    if hf.experts:
        values |= _expert_values(hf, config, layout, with_te)
    if config.model.recompute == "full":
        values |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    try:
        kind, values = (TransformerConfig, values) if hf.latent is None else (
            MLATransformerConfig, values | _latent_values(hf))
        made = kind(**values | config.megatron)
    except (ValueError, AssertionError) as error:
        raise UserMistake(f"Megatron-core refuses this model: {error}",
                          f"megatron: {', '.join(config.megatron)}" if config.megatron else "parallel, model",
                          "see Megatron-core's TransformerConfig") from error
    asked = config.pipeline.schedule
    splits = layout.pipeline > 1 and (asked == "auto" or SCHEDULES[asked].splits)
    made.delay_wgrad_compute = with_te and splits  # set here, it may go without overlap_moe_expert_parallel_comm
    return made


def _expert_values(hf: HFConfig, config: Config, layout: Layout, with_te: bool) -> dict[str, Any]:
    """The experts' part of Megatron-core's config."""
    megatrons = config.model.balance.form == "megatron"
    return dict(
        num_moe_experts=hf.experts, moe_ffn_hidden_size=hf.moe_ffn, moe_router_topk=hf.top_k,
        moe_router_pre_softmax=not hf.norm_topk, moe_router_dtype="fp32",
        moe_router_score_function="sigmoid" if hf.router_bias else "softmax",
        moe_router_num_groups=hf.router_groups if hf.router_groups > 1 else None,
        moe_router_group_topk=hf.groups_taken if hf.router_groups > 1 else None,
        moe_router_topk_scaling_factor=hf.route_scale if hf.route_scale != 1 else None,
        moe_shared_expert_intermediate_size=hf.shared_ffn or None,
        moe_layer_freq=[int(layer in hf.moe_layers) for layer in range(hf.layers)] if hf.dense_layers else 1,
        moe_router_load_balancing_type="aux_loss" if megatrons else "none",
        moe_aux_loss_coeff=config.model.balance.coefficient if megatrons else 0.0, moe_grouped_gemm=with_te,
        moe_token_dispatcher_type="alltoall", expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor)


def _latent_values(hf: HFConfig) -> dict[str, Any]:
    """Latent attention's part of Megatron-core's config. Angles come with the pack, so of YaRN only the scale of the
    scores is told."""
    sizes, yarn = hf.latent, hf.rope_scaling
    return dict(q_lora_rank=sizes.q_rank or None, kv_lora_rank=sizes.kv_rank, qk_head_dim=sizes.plain,
                qk_pos_emb_head_dim=sizes.rotated, v_head_dim=sizes.value, rope_type="rope",
                rotary_scaling_factor=yarn.factor if yarn else 1.0, mscale_all_dim=yarn.mscale if yarn else 0.0)


def build_chunks(hf: HFConfig, config: Config, layout: Layout) -> list[torch.nn.Module]:
    """This rank's chunks of the policy, in the order of their stages; weights are uninitialised.

    Needs parallel_state initialised for `layout`. Load weights with `checkpoint.hf_import.load_hf`.
    """
    megatron_fixes.apply()
    *_, rank = coordinates(layout, dist.get_rank())
    model = stages.parts(hf, layout, config.parallel.layers_per_stage)
    return [_build_chunk(hf, config, layout, model, part) for part in model
            if rank in layout.placement_table[part.stage]]


def _build_chunk(hf: HFConfig, config: Config, layout: Layout, model: tuple[Part, ...], part: Part) -> PolicyChunk:
    """The chunk of one stage.

    Megatron-core takes a stage for a rank of its pipeline group. What it derives from that (numbers of layers in
    checkpoints, what to do with tied embeddings) it gets from the stage instead, by a config and groups of its own.
    """
    kind = implementation(config, hf)
    transformer = transformer_config(hf, config, layout)
    transformer.pipeline_model_parallel_layout = _FirstLayer(part.first_layer)
    has_experts = [part.first_layer + number in hf.moe_layers for number in range(part.layers)]
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.pp, groups.embd = _StageGroup(part.stage, part.stages), None
    chunk = PolicyChunk(hf, transformer, block_spec(transformer, kind, has_experts), kind,
                        padded_vocab(hf, layout), config.model.balance, model, part, groups)
    megatron_fixes.mark_experts(chunk, layout)
    return chunk.to(device.current())


@dataclass(frozen=True)
class _StageGroup:
    """What Megatron-core's model code asks of a pipeline group."""

    stage: int
    stages: int

    def rank(self) -> int:
        return self.stage

    def size(self) -> int:
        return self.stages


@dataclass(frozen=True)
class _FirstLayer:
    """What Megatron-core's model code asks of a pipeline layout."""

    first_layer: int

    def get_layer_offset(self, *_: Any, **__: Any) -> int:
        return self.first_layer
