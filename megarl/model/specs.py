"""Layer specs of the two implementations, for a stage with a given number of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megarl.model.attention import PackedAttention
from megarl.model.latent import LatentNorm, PackedLatentAttention
from megarl.model.linear import ColumnParallelLinear, RowParallelLinear
from megarl.model.norm import RMSNorm
from megarl.model.router import Router


def block_spec(config: TransformerConfig, implementation: Literal["local", "transformer_engine"],
               has_experts: Sequence[bool]) -> TransformerBlockSubmodules:
    """A block of layers, with experts or dense, and a final norm (which Megatron builds on the last stage only)."""
    if implementation == "local":
        make, norm = local_layer, RMSNorm
    else:
        from megatron.core.extensions.transformer_engine import TENorm

        make, norm = transformer_engine_layer, TENorm
    return TransformerBlockSubmodules(layer_specs=[make(config, moe) for moe in has_experts], layer_norm=norm)


def local_layer(config: TransformerConfig, has_experts: bool) -> ModuleSpec:
    """Megatron-core's layer and experts, with megarl's RMSNorm, packed attention, router, and linears whose weight
    gradient can wait."""
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    if has_experts:
        experts = ModuleSpec(module=SequentialMLP, submodules=linears)
        shared = ModuleSpec(module=SharedExpertMLP, submodules=linears)  # built where the config has one
        mlp = ModuleSpec(module=MoELayer, submodules=MoESubmodules(
            experts=experts, shared_experts=shared, router=Router))
    else:
        mlp = ModuleSpec(module=MLP, submodules=linears)
    return ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(
        input_layernorm=RMSNorm, self_attention=local_attention(config), self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm, mlp=mlp, mlp_bda=get_bias_dropout_add))


def local_attention(config: TransformerConfig) -> ModuleSpec:
    """Grouped queries, or latent vectors."""
    if config.multi_latent_attention:
        return ModuleSpec(
            module=PackedLatentAttention, params={"attn_mask_type": AttnMaskType.causal},
            submodules=MLASelfAttentionSubmodules(
                linear_q_proj=ColumnParallelLinear, linear_q_down_proj=layers.ColumnParallelLinear,
                linear_q_up_proj=ColumnParallelLinear, linear_kv_down_proj=layers.ColumnParallelLinear,
                linear_kv_up_proj=ColumnParallelLinear, core_attention=PackedAttention,
                linear_proj=RowParallelLinear, q_layernorm=LatentNorm, kv_layernorm=LatentNorm))
    head_norm = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=PackedAttention, linear_proj=RowParallelLinear,
            q_layernorm=head_norm, k_layernorm=head_norm))


def transformer_engine_layer(config: TransformerConfig, has_experts: bool) -> ModuleSpec:
    """Megatron-core's Transformer Engine layer, with megarl's router."""
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if has_experts else None, moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm)
    if has_experts:
        layer.submodules.mlp.submodules.router = Router
    return layer
