"""The engine's weights: fused for few operations per step, addressed by Hugging Face name.

Every Hugging Face tensor is a view into fused storage, so loading by name writes in place and nothing is kept twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.errors import UserMistake
from megarl.model.families.tables import MLPNames, hf_tensors, moe_names
from megarl.model.hf_config import HFConfig
from megarl.rollout.embedded.latent import LatentWeights
from megarl.sync.checksum import tensor_checksum

# Up to this many weights per matrix of all experts together, running every expert on every token costs less than
# sorting tokens by expert (measured on one core with 16 and 64 rows, 8 to 64 experts).
FUSED_EXPERTS_MOST = 1 << 18


@dataclass
class LayerWeights:
    """One decoder layer. E = experts, 1 for a dense MLP; f = inner size of one expert or of the MLP.

    Attributes:
        norm1_h, norm2_h: RMSNorm weights before attention and before the MLP.
        latent: what makes q, k and v where they come from latent vectors, else None.
        qkv_oh: rows of q, k, v, None with latent vectors; qkv_o its bias or None.
        qk_norm_nd: the q norm once per q head, then the k norm once per kv head, [heads + kv_heads, head_dim]; None
            without q/k norms. Filled from `q_norm_d` and `k_norm_d` by `Weights.refresh`.
        o_oh: output projection, to multiply from the right.
        router_eh: None for a dense MLP.
        bias_e: float32, added to the scores of experts when they are chosen; None without.
        shared_gate_up_oh, shared_down_fh: of the expert that all tokens take, to multiply from the left and from the
            right; None without.
        gate_up_2efh: [2, E, f, h].
        down_efh: one matrix [f, h] per expert, to multiply from the right.
        fused_gate_up_oh, fused_down_fh: the same of all experts below each other, [2 E f, h] and [E f, h]; the second
            is None where experts are many (`Weights.fused_experts` is False).
    """

    norm1_h: torch.Tensor
    latent: LatentWeights | None
    qkv_oh: torch.Tensor | None
    qkv_o: torch.Tensor | None
    q_norm_d: torch.Tensor | None
    k_norm_d: torch.Tensor | None
    qk_norm_nd: torch.Tensor | None
    o_oh: torch.Tensor
    norm2_h: torch.Tensor
    router_eh: torch.Tensor | None
    bias_e: torch.Tensor | None
    shared_gate_up_oh: torch.Tensor | None
    shared_down_fh: torch.Tensor | None
    gate_up_2efh: torch.Tensor
    down_efh: torch.Tensor
    fused_gate_up_oh: torch.Tensor
    fused_down_fh: torch.Tensor | None


class Weights:
    """All weights of one model.

    Args:
        hf: the model.
        dtype: of the weights and of the computation.

    Attributes:
        views: Hugging Face name -> the tensor as the checkpoint has it, a view of the fused storage.
        fused_experts: all experts of a layer are multiplied at once in a decode step (also a dense MLP, as one expert).
    """

    def __init__(self, hf: HFConfig, dtype: torch.dtype) -> None:
        self.hf, self.dtype = hf, dtype
        self.views: dict[str, torch.Tensor] = {}
        self.fused_experts = hf.experts * hf.moe_ffn * hf.hidden <= FUSED_EXPERTS_MOST
        self.embedding_vh = self._new("model.embed_tokens.weight", hf.vocab, hf.hidden)
        self.layers = [self._layer(f"model.layers.{number}", number in hf.moe_layers) for number in range(hf.layers)]
        self.norm_h = self._new("model.norm.weight", hf.hidden)
        self.head_vh = self.embedding_vh if hf.tied else self._new("lm_head.weight", hf.vocab, hf.hidden)
        expected = {tensor.name: tensor.shape for tensor in hf_tensors(hf)}
        found = {name: tuple(view.shape) for name, view in self.views.items()}
        if expected != found:
            raise AssertionError(f"name table and engine differ: {sorted(expected.items() ^ found.items())[:4]}")

    def _new(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        self.views[name] = torch.zeros(shape, dtype=dtype or self.dtype)
        return self.views[name]

    def _layer(self, at: str, moe: bool) -> LayerWeights:
        hf, block = self.hf, moe_names(self.hf).block if moe else "mlp"
        return LayerWeights(
            norm1_h=self._new(f"{at}.input_layernorm.weight", hf.hidden),
            **self._attention(f"{at}.self_attn"), norm2_h=self._new(f"{at}.post_attention_layernorm.weight", hf.hidden),
            **self._router(f"{at}.{block}", moe), **self._mlp(f"{at}.{block}", moe))

    def _attention(self, at: str) -> dict[str, torch.Tensor | LatentWeights | None]:
        hf, dim = self.hf, self.hf.head_dim
        if hf.latent:
            o_ho = self._new(f"{at}.o_proj.weight", hf.hidden, hf.heads * hf.latent.value)
            return dict.fromkeys(("qkv_oh", "qkv_o", "q_norm_d", "k_norm_d", "qk_norm_nd")) | {
                "latent": LatentWeights.make(hf, at, self._new), "o_oh": o_ho.t()}
        sizes = (hf.heads * dim, hf.kv_heads * dim, hf.kv_heads * dim)
        qkv_oh = torch.zeros(sum(sizes), hf.hidden, dtype=self.dtype)
        qkv_o = torch.zeros(sum(sizes), dtype=self.dtype) if hf.qkv_bias else None
        for kind, fused in (("weight", qkv_oh), ("bias", qkv_o)):
            if fused is not None:
                for name, view in zip("qkv", fused.split(sizes), strict=True):
                    self.views[f"{at}.{name}_proj.{kind}"] = view
        q_norm = k_norm = qk_norm = None
        if hf.qk_norm:
            q_norm, k_norm = (self._new(f"{at}.{name}_norm.weight", dim) for name in "qk")
            qk_norm = torch.zeros(hf.heads + hf.kv_heads, dim, dtype=self.dtype)
        o_ho = self._new(f"{at}.o_proj.weight", hf.hidden, sizes[0])
        return {"latent": None, "qkv_oh": qkv_oh, "qkv_o": qkv_o, "q_norm_d": q_norm, "k_norm_d": k_norm,
                "qk_norm_nd": qk_norm, "o_oh": o_ho.t()}

    def _router(self, at: str, moe: bool) -> dict[str, torch.Tensor | None]:
        """The router, its bias, which must not be rounded, and the shared expert."""
        hf, found = self.hf, dict.fromkeys(("router_eh", "bias_e", "shared_gate_up_oh", "shared_down_fh"))
        if not moe:
            return found
        found["router_eh"] = self._new(f"{at}.gate.weight", hf.experts, hf.hidden)
        if hf.router_bias:
            found["bias_e"] = self._new(f"{at}.gate.e_score_correction_bias", hf.experts, dtype=torch.float32)
        if hf.shared_ffn:
            gate_up = torch.zeros(2 * hf.shared_ffn, hf.hidden, dtype=self.dtype)
            for name, view in zip(("gate", "up"), gate_up.chunk(2), strict=True):
                self.views[f"{at}.shared_experts.{name}_proj.weight"] = view
            down_hf = self._new(f"{at}.shared_experts.down_proj.weight", hf.hidden, hf.shared_ffn)
            found |= {"shared_gate_up_oh": gate_up, "shared_down_fh": down_hf.t()}
        return found

    def _mlp(self, at: str, moe: bool) -> dict[str, torch.Tensor | None]:
        hf, fused = self.hf, self.fused_experts or not moe
        experts, ffn = (hf.experts, hf.moe_ffn) if moe else (1, hf.ffn)
        gate_up = torch.zeros(2, experts, ffn, hf.hidden, dtype=self.dtype)
        # stored so that the product that is taken has its rows of h in one piece
        down = torch.zeros((hf.hidden, experts, ffn) if fused else (experts, hf.hidden, ffn), dtype=self.dtype)
        down_ehf = down.transpose(0, 1) if fused else down
        names = moe_names(hf) if moe else MLPNames()
        for expert in range(experts):
            name = f"{at}.experts.{expert}" if moe else at
            self.views[f"{name}.{names.gate}.weight"] = gate_up[0, expert]
            self.views[f"{name}.{names.up}.weight"] = gate_up[1, expert]
            self.views[f"{name}.{names.down}.weight"] = down_ehf[expert]
        return {"gate_up_2efh": gate_up, "down_efh": down_ehf.transpose(1, 2),
                "fused_gate_up_oh": gate_up.flatten(0, 2), "fused_down_fh": down.flatten(1).t() if fused else None}

    def problem(self, name: str, shape: tuple[int, ...]) -> str:
        """Why a tensor of this name and shape cannot be loaded; "" if it can."""
        if self.is_tied_head(name):
            name = "model.embed_tokens.weight"
        if name not in self.views:
            return f"the model has no tensor {name}"
        if tuple(self.views[name].shape) != tuple(shape):
            return f"{name} has shape {list(shape)}, expected {list(self.views[name].shape)}"
        return ""

    def is_tied_head(self, name: str) -> bool:
        """Whether `name` is a second copy of tied embeddings, which is ignored."""
        return self.hf.tied and name == "lm_head.weight"

    @torch.inference_mode()
    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor in place, cast to the engine's dtype. Call `refresh` after the last one."""
        if not self.is_tied_head(name):
            self.views[name].copy_(tensor)

    @torch.inference_mode()
    def refresh(self) -> None:
        """Rebuild what is derived from loaded tensors."""
        for layer in self.layers:
            if layer.qk_norm_nd is not None:
                layer.qk_norm_nd[: self.hf.heads] = layer.q_norm_d
                layer.qk_norm_nd[self.hf.heads:] = layer.k_norm_d

    def load_checkpoint(self, path: str | Path) -> None:
        """Load every tensor from the safetensors files in `path`.

        Raises:
            UserMistake: no or unreadable safetensors, a missing shard or tensor, a wrong shape. Weights that were
                loaded before that stay overwritten.
        """
        missing = set(self.views)
        for name, tensor in iter_checkpoint(Path(path)):
            if name not in self.views:
                continue  # a tied head, or buffers such as inv_freq that older checkpoints carry
            if problem := self.problem(name, tuple(tensor.shape)):
                raise UserMistake(problem, str(path), "config.json and the weights must be of one model")
            self.load(name, tensor)
            missing.discard(name)
        if missing:
            raise UserMistake(f"{len(missing)} tensors are missing, among them {min(missing)}", str(path),
                              "restore the checkpoint from its source")
        self.refresh()

    def checksums(self) -> dict[str, str]:
        """`tensor_checksum` of each tensor by Hugging Face name, as the engine holds it."""
        return {name: tensor_checksum(view) for name, view in self.views.items()}


def iter_checkpoint(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a checkpoint directory, shard by shard.

    Raises:
        UserMistake: nothing to read, a shard that the index names is missing, a file that is not safetensors.
    """
    from safetensors import SafetensorError, safe_open

    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError) as error:
            raise UserMistake(f"not a safetensors index: {error}", str(index), "restore the file") from None
    else:
        files = ["model.safetensors"]
    for file in files:
        try:
            with safe_open(directory / file, framework="pt") as opened:
                for name in opened.keys():
                    yield name, opened.get_tensor(name)
        except FileNotFoundError:
            raise UserMistake(f"the weights file {file} is missing", str(directory),
                              "restore it; weights are read from *.safetensors") from None
        except SafetensorError as error:
            raise UserMistake(f"not a safetensors file: {error}", str(directory / file), "restore it") from None
