"""One micro-batch as tensors: a pack of sequences end to end (thd), the share of one context-parallel rank.

Everything per position is aligned with the position that *predicts*: at position t of a sequence, labels_t is the
sequence's token t + 1, and a value in `per_token` belongs to that label. So a response's first token is predicted at
the last position of its prompt.

Context parallelism is zig-zag, as Megatron-core and TransformerEngine lay it out: each sequence, padded to a multiple
of 2 * cp, is cut into 2 * cp chunks, and rank r holds chunks r and 2 * cp - 1 - r of every sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from megarl.config.layout import Layout
from megarl.data.packing import padded
from megarl.data.ragged import SampleBatch, offsets, ranges
from megarl.data.routing import ReplayShare


@dataclass(frozen=True)
class PackedBatch:
    """A pack, or its share on one context-parallel rank. T_local = padded tokens of the pack / cp_size.

    Attributes:
        tokens_t, positions_t: int64 [T_local]; the token and its place in its sequence (padding counts on; 0 upwards in
            the tail padding too).
        labels_t: int64 [T_local], the next token of the same sequence; 0 where there is none.
        mask_t: bool [T_local], True where the label is a response token that is trained on.
        padding_t: bool [T_local], True for padding, of a sequence or of the tail.
        sequence_t: int64 [T_local], which of the pack's sequences; its padding included; `sequences` in the tail.
        cu_seqlens: int32 [entries + 1], where each padded sequence starts in the whole pack, and the end. Tail padding,
            if there is any, is one more entry after the sequences. Always on the host, where attention is laid out.
        max_seqlen: tokens of the longest entry.
        samples: int64 [sequences], the number of each sequence's sample in the experience.
        per_token: float32 [T_local] each, 0 where mask_t is False. `lag`: by how many versions the weights that sampled
            the token are older than those of this experience.
        experts: by number of the model's layer, uint8 or uint16 [tokens here, k]: where to route this rank's tokens
            (its share under sequence parallelism), the largest number of the type where a token is free. Those of an
            engine from the start, or what a pass over the batch recorded; {}: all tokens are free.
        cp_size, cp_rank: context parallelism.
    """

    tokens_t: torch.Tensor
    positions_t: torch.Tensor
    labels_t: torch.Tensor
    mask_t: torch.Tensor
    padding_t: torch.Tensor
    sequence_t: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    samples: torch.Tensor
    per_token: dict[str, torch.Tensor] = field(default_factory=dict)
    experts: dict[int, torch.Tensor] = field(default_factory=dict)
    cp_size: int = 1
    cp_rank: int = 0

    @property
    def sequences(self) -> int:
        """Sequences in the pack, tail padding not counted; 0 for a filler."""
        return len(self.samples)

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with all tensors but cu_seqlens on `device`."""
        moved = {one.name: getattr(self, one.name).to(device, non_blocking=True) for one in fields(self)
                 if isinstance(getattr(self, one.name), torch.Tensor) and one.name != "cu_seqlens"}
        per_token = {name: value.to(device, non_blocking=True) for name, value in self.per_token.items()}
        experts = {layer: value.to(device, non_blocking=True) for layer, value in self.experts.items()}
        return replace(self, per_token=per_token, experts=experts, **moved)


def build_batch(samples: SampleBatch, indices: Sequence[int] | np.ndarray, layout: Layout, *, cp_rank: int = 0,
                numbers: np.ndarray | None = None, per_token: Mapping[str, np.ndarray] | None = None,
                per_sample: Mapping[str, np.ndarray] | None = None, pad_token: int = 0,
                replay: ReplayShare | None = None) -> PackedBatch:
    """Pack the samples at `indices` for one context-parallel rank; CPU tensors.

    Without samples the result is a *filler*: layout.pack_multiple tokens of tail padding, the smallest pack that every
    context- and sequence-parallel rank can take its share of, and nothing that is trained on.

    Args:
        samples: where the sequences come from. Its engine log-probs become per_token["engine_logprobs"].
        indices: rows of `samples`, the sequences of this pack in order.
        layout: gives the context-parallel degree and the multiples to pad to.
        cp_rank: whose share.
        numbers: int64 [len(samples)], the number of each sample in the experience; its row if not given.
        per_token: name -> [sum of samples.response_lengths], one value per response token, flat in order of rows.
        per_sample: name -> [len(samples)], one value for all response tokens of a sample.
        pad_token: token id of padding.
        replay: which of the samples' experts this rank needs; None: none.
    """
    rows = np.asarray(indices, np.int64)
    prompt, response = samples.prompt_lengths[rows], samples.response_lengths[rows]
    length = prompt + response
    bounds = _boundaries(length, layout)
    starts, total = bounds[:len(rows)], int(bounds[-1])
    entry = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    real = ranges(starts, length)
    source = ranges(offsets(samples.lengths)[rows], length)
    predicts = ranges(starts, length - 1)
    answers = ranges(starts + prompt - 1, response)

    tokens = np.full(total, pad_token, np.int64)
    tokens[real] = samples.tokens[source]
    labels, mask, padding = np.zeros(total, np.int64), np.zeros(total, bool), np.ones(total, bool)
    labels[predicts] = tokens[predicts + 1]
    flat = ranges(offsets(samples.response_lengths)[rows], response)
    trained = samples.versions[flat] >= 0
    answers = answers[trained]
    mask[answers], padding[real] = True, False

    values = {name: value[flat] for name, value in _values(samples, per_token or {}, per_sample or {}).items()}
    mine = zigzag(bounds, layout.context, cp_rank)

    def share(whole: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(whole[mine])

    def placed(value: np.ndarray) -> torch.Tensor:
        whole = np.zeros(total, np.float32)
        whole[answers] = value[trained]
        return share(whole)

    experts = {} if replay is None else _experts(samples, replay, total, real, source, mine)
    return PackedBatch(
        tokens_t=share(tokens), positions_t=share(np.arange(total) - bounds[entry]), labels_t=share(labels),
        mask_t=share(mask), padding_t=share(padding), sequence_t=share(entry),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)), max_seqlen=int(np.diff(bounds).max()),
        samples=torch.from_numpy(rows if numbers is None else np.asarray(numbers, np.int64)[rows]),
        per_token={name: placed(value) for name, value in values.items()}, experts=experts,
        cp_size=layout.context, cp_rank=cp_rank)


def _experts(samples: SampleBatch, replay: ReplayShare, total: int, real: np.ndarray, source: np.ndarray,
             mine: np.ndarray) -> dict[int, torch.Tensor]:
    """The experts of this rank's tokens and layers; padding routes freely. The other arguments as in `build_batch`."""
    whole = np.full((total, *samples.experts.shape[1:]), replay.shape.free, replay.shape.dtype)
    whole[real] = samples.experts[source]
    return {layer: torch.from_numpy(chosen) for layer, chosen in replay.cut(whole[mine]).items()}


def _values(samples: SampleBatch, per_token: Mapping[str, np.ndarray], per_sample: Mapping[str, np.ndarray]
            ) -> dict[str, np.ndarray]:
    """A value for each response token of all samples, float32 [sum of samples.response_lengths] each."""
    values = {name: _checked(name, value, len(samples.logprobs))
              for name, value in {"engine_logprobs": samples.logprobs, **per_token}.items()}
    return values | {name: np.repeat(_checked(name, value, len(samples)), samples.response_lengths)
                     for name, value in per_sample.items()}


def _boundaries(lengths: np.ndarray, layout: Layout) -> np.ndarray:
    """Padded starts of the sequences and, if there is any, of the tail padding, and the pack's end: int64."""
    bounds = offsets(padded(lengths, layout.sequence_multiple))
    total = padded(max(int(bounds[-1]), 1), layout.pack_multiple)
    return np.append(bounds, total) if total > bounds[-1] else bounds


def _checked(name: str, value: np.ndarray, rows: int) -> np.ndarray:
    if len(value) != rows:
        raise ValueError(f"{name} has {len(value)} values for {rows}")
    return np.asarray(value, np.float32)


def zigzag(bounds: np.ndarray, cp_size: int, cp_rank: int) -> np.ndarray:
    """Positions in the whole pack that a context-parallel rank holds, in its order: int64 [T / cp_size].

    Args:
        bounds: [entries + 1], padded boundaries; the lengths are multiples of 2 * cp_size if cp_size > 1.
    """
    bounds = np.asarray(bounds, np.int64)
    if cp_size == 1:
        return np.arange(bounds[-1])
    lengths = np.diff(bounds)
    if (lengths % (2 * cp_size)).any():
        raise ValueError(f"lengths {lengths.tolist()} are not all multiples of {2 * cp_size}")
    chunk = lengths // (2 * cp_size)
    starts = np.stack((bounds[:-1] + cp_rank * chunk, bounds[:-1] + (2 * cp_size - 1 - cp_rank) * chunk), axis=1)
    return ranges(starts.reshape(-1), np.repeat(chunk, 2))
