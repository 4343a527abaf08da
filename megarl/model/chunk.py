"""One pipeline stage of the policy: Megatron-core's GPTModel on packs; it ends at hidden states, never at logits."""

from __future__ import annotations

from typing import Any, Literal

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.cluster import device
from megarl.config.schema import BalanceConfig
from megarl.config.stages import Part
from megarl.model import rope
from megarl.model.attention import LocalPack, varlen_kernel
from megarl.model.hf_config import HFConfig
from megarl.model.router import Router, RouterState
from megarl.model.segments import segments


class PolicyChunk(GPTModel):
    """The layers of one stage; the embedding on the first, the final norm and the head's weight on the last.

    Attributes:
        hf: the model's config.
        implementation: local or transformer_engine; decides the parameters' names.
        model, part: how the model is cut into stages, and which one this is.
        routers: state of this chunk's MoE routers; None in a dense model.
    """

    def __init__(self, hf: HFConfig, config: TransformerConfig, spec: TransformerBlockSubmodules,
                 implementation: Literal["local", "transformer_engine"], vocab_size: int, balance: BalanceConfig,
                 model: tuple[Part, ...], part: Part, groups: ProcessGroupCollection) -> None:
        super().__init__(
            config=config, transformer_layer_spec=spec, vocab_size=vocab_size, max_sequence_length=hf.max_positions,
            pre_process=part.is_first, post_process=part.is_last, position_embedding_type="rope",
            share_embeddings_and_output_weights=hf.tied, rotary_base=hf.rope_theta, pg_collection=groups)
        self.hf, self.implementation, self.model, self.part = hf, implementation, model, part
        where = device.current()
        self.frequencies = rope.inverse_frequencies(hf).to(where)
        if hf.latent is None:
            self.rotary_pos_emb.inv_freq = self.frequencies
        self.routers: RouterState | None = None
        if hf.experts:
            here = range(part.first_layer, part.first_layer + part.layers)
            self.routers = RouterState([layer for layer in hf.moe_layers if layer in here], hf.experts, balance, where)
            for number, router in enumerate(self.router_modules()):
                router.attach(self.routers, number, hf.router_bias)

    def weights(self) -> dict[str, torch.Tensor]:
        """By name all that a checkpoint holds: parameters, and the routers' biases, which are none."""
        biases = {name: tensor for name, tensor in self.named_buffers() if name.endswith(".router.expert_bias")}
        return {**dict(self.named_parameters()), **biases}

    def router_modules(self) -> list[Router]:
        """The routers of its layers with experts, in order."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def forward(self, batch: Any) -> torch.Tensor:
        """Hidden states of a pack.

        Args:
            batch: a `data.batch.PackedBatch`; used are tokens_t, positions_t, padding_t (this context-parallel rank's
                tokens), cu_seqlens, max_seqlen (the whole pack's, on the host), cp_size and cp_rank; experts where
                routing is recorded or replayed.

        Returns:
            [tokens, 1, hidden], this rank's share of tokens under sequence parallelism; after the final norm on the
            last stage. On stages after the first the input comes from `set_input_tensor`.
        """
        hidden_tbh = None
        if self.pre_process:
            hidden_tbh = self.embedding(input_ids=batch.tokens_t[None], position_ids=batch.positions_t[None])
        padding_bt = None
        if self.routers is not None:
            self.routers.begin(batch)
            padding_bt = batch.padding_t[None]
            if self.config.sequence_parallel:  # GPTModel does this on the first stage only
                padding_bt = scatter_to_sequence_parallel_region(batch.padding_t, group=self.pg_collection.tp)[None]
        pack, rotary = self.attention_inputs(batch)
        output_tbh = self.decoder(hidden_states=hidden_tbh, attention_mask=None, rotary_pos_emb=rotary,
                                  packed_seq_params=pack, padding_mask=padding_bt)
        return output_tbh if self.routers is None else self.routers.within(output_tbh, batch)

    def attention_inputs(self, batch: Any) -> tuple[PackedSeqParams, torch.Tensor | None]:
        """The pack's boundaries and rotary angles in the form that this implementation's attention takes."""
        if self.implementation == "local":
            where = batch.tokens_t.device
            laid_out = segments(batch.cu_seqlens.tolist(), batch.cp_size, batch.cp_rank, where,
                                padded=varlen_kernel(where.type, self.config.params_dtype) is None)
            angles = rope.angles(batch.positions_t, self.frequencies)
            if self.hf.latent is not None:
                return LocalPack(segments=laid_out, angles_t1d=angles[:, 0]), None
            return LocalPack(segments=laid_out), angles
        bounds = batch.cu_seqlens.to(batch.tokens_t.device, non_blocking=True)
        pack = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds,
                               max_seqlen_q=batch.max_seqlen, max_seqlen_kv=batch.max_seqlen)
        if batch.cp_size > 1:  # TE's ring attention addresses its shares by these
            pack.cu_seqlens_q_padded = pack.cu_seqlens_kv_padded = bounds
        # not through its forward(), which keeps the tables of the last 32 lengths
        return pack, self.rotary_pos_emb.get_emb(batch.max_seqlen)

    def head_weight(self) -> torch.Tensor:
        """The output projection [padded vocabulary / tp, hidden], tied or not; last stage only."""
        if not self.post_process:
            raise RuntimeError(f"stage {self.part.stage} of {self.part.stages} has no head")
        return self.shared_embedding_or_output_weight() if self.hf.tied else self.output_layer.weight


def unwrapped(chunk: torch.nn.Module) -> PolicyChunk:
    """The PolicyChunk inside wrappers such as Megatron's DDP."""
    while not isinstance(chunk, PolicyChunk):
        chunk = chunk.module
    return chunk
