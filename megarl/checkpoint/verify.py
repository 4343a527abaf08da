"""A conversion under test: the logits of a Megatron-core model against those of transformers, on the same tokens."""

from __future__ import annotations

import datetime
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist

from megarl.checkpoint.megatron_dir import MegatronDir
from megarl.checkpoint.safetensors_dir import SafetensorsDir
from megarl.cluster import device
from megarl.errors import UserMistake
from megarl.model.hf_config import HFConfig

LENGTHS = (48, 7, 96)  # tokens of the sequences that are compared


@dataclass(frozen=True)
class Agreement:
    """How far two models agree.

    Attributes:
        error: largest difference of two logits.
        largest: largest logit.
        same_choice: share of tokens with the same most likely next token.
        tokens: compared.
    """

    error: float
    largest: float
    same_choice: float
    tokens: int

    @property
    def good(self) -> bool:
        """Whether rounding in fp32 explains the differences."""
        return self.error <= 1e-5 * max(1.0, self.largest)

    def describe(self) -> str:
        """One line."""
        return (f"largest difference of logits {self.error:.2e} (largest logit {self.largest:.1f}), same most likely "
                f"token at {100 * self.same_choice:.1f} % of {self.tokens} tokens")


def verify(hugging_face: Path, megatron: Path, made: Literal["hugging_face", "megatron"],
           dtype: torch.dtype | None = None, seed: int = 0) -> Agreement:
    """Compare the two checkpoints in fp32 on random tokens.

    Both models are in memory, one after the other. Megatron-core's runs as training has it: packed, on its own layers,
    on this process alone, which must not be in a process group.

    Args:
        hugging_face, megatron: the checkpoints.
        made: which of them the conversion has made; the other's weights are rounded as it has rounded them.
        dtype: that the conversion to Megatron-core was asked for.
        seed: of the tokens.
    """
    with warnings.catch_warnings(action="ignore"):  # of packages that Megatron-core misses
        return _verify(hugging_face, megatron, made, dtype, seed)


def _verify(hugging_face: Path, megatron: Path, made: Literal["hugging_face", "megatron"], dtype: torch.dtype | None,
            seed: int) -> Agreement:
    device.prepare("cpu")  # before anything imports Megatron-core
    hf = HFConfig.read(hugging_face)
    generator = torch.Generator().manual_seed(seed)
    longest = min(max(LENGTHS), hf.max_positions)
    sequences = [torch.randint(hf.vocab, (min(n, longest),), generator=generator) for n in LENGTHS]
    expected = _by_transformers(hugging_face, sequences, dtype if made == "megatron" else None)
    weights: Any = MegatronDir(megatron, hf)
    if made == "hugging_face":
        weights = _Rounded(weights, SafetensorsDir(hugging_face))
    found = _by_megatron(weights, hf, sequences)
    return Agreement(float((found - expected).abs().max()), float(expected.abs().max()),
                     float((found.argmax(-1) == expected.argmax(-1)).float().mean()), len(expected))


def verified(hugging_face: Path, megatron: Path, made: Literal["hugging_face", "megatron"],
             dtype: torch.dtype | None = None) -> str:
    """What to tell of a conversion whose two sides agree.

    Raises:
        UserMistake: they do not.
    """
    agreement = verify(hugging_face, megatron, made, dtype)
    if not agreement.good:
        raise UserMistake(f"the converted model is another: {agreement.describe()}",
                          str(megatron if made == "megatron" else hugging_face),
                          "do not use it; report the family and the config.json")
    return f"verified: {agreement.describe()}"


@dataclass(frozen=True)
class _Rounded:
    """A checkpoint's tensors in the dtypes that another one has."""

    weights: MegatronDir
    like: SafetensorsDir

    def read(self, name: str, *where: Any) -> torch.Tensor:
        return self.weights.read(name, *where).to(self.like.dtype(name))


@torch.no_grad()
def _by_transformers(path: Path, sequences: list[torch.Tensor], rounded: torch.dtype | None) -> torch.Tensor:
    """Logits [tokens, vocab], each sequence alone."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.copy_(parameter.to(rounded or parameter.dtype))
    return torch.cat([model(tokens[None], use_cache=False).logits[0] for tokens in sequences])


@torch.no_grad()
def _by_megatron(weights: Any, hf: HFConfig, sequences: list[torch.Tensor]) -> torch.Tensor:
    """The same from one pack."""
    from megatron.core import parallel_state

    from megarl.checkpoint.hf_import import load_weights
    from megarl.cluster.groups import make_groups
    from megarl.config.layout import Layout
    from megarl.config.schema import Config
    from megarl.model.build import build_chunks

    config = Config.model_validate({
        "model": {"path": hf.path, "dtype": "fp32", "implementation": "local"},
        "data": {"sources": [{"path": "none"}]}, "reward": {"terms": [{"name": "exact"}]}})
    timeout = datetime.timedelta(minutes=10)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        make_groups(layout := Layout(1), timeout, seed=0)
        chunk, = build_chunks(hf, config, layout)
        load_weights([chunk], weights, hf)
        hidden = chunk.eval()(_pack(sequences))[:, 0]
        return hidden @ chunk.head_weight()[:hf.vocab].T
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _pack(sequences: list[torch.Tensor]) -> SimpleNamespace:
    """What a model takes of a `data.batch.PackedBatch`."""
    lengths = [len(tokens) for tokens in sequences]
    return SimpleNamespace(
        tokens_t=torch.cat(sequences), positions_t=torch.cat([torch.arange(n) for n in lengths]),
        padding_t=torch.zeros(sum(lengths), dtype=torch.bool), experts={}, cp_size=1, cp_rank=0,
        cu_seqlens=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32), max_seqlen=max(lengths))
