"""A pack of sequences as attention sees it on one context-parallel rank: segments of queries and the keys they see.

Without context parallelism a segment is a sequence. With it (zig-zag), rank r of c holds chunks r and 2c-1-r of the 2c
chunks of each sequence; each chunk is a segment, whose queries see the keys from the sequence's start to the chunk's
end. In both cases the mask of a segment is causal and aligned to the lower right corner.

Segments of similar length are computed together as a padded batch: a sequence of 40 tokens costs little arithmetic
and many calls. Pure index arithmetic; no megatron, no torch.distributed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Group:
    """Segments padded to one shape. `mask`: bool [segments, 1, queries, keys], True where visible; None: causal."""

    segments: int
    queries: int
    keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class Padded:
    """Segments as padded groups.

    Attributes:
        query_rows, key_rows: int64, rows that fill the padded groups one after the other; padding repeats a segment's
            last row.
        output_rows: int64 [tokens on this rank], where each token's output is among the padded groups' rows.
        groups: the padded shapes, in that order.
    """

    query_rows: torch.Tensor
    key_rows: torch.Tensor
    output_rows: torch.Tensor
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Segments:
    """Where each segment's queries and keys are.

    Attributes:
        cu_q, cu_k: int32 [segments + 1], boundaries of the segments' queries (in the order of this rank's tokens) and
            of their keys (in the order of `keys`); max_q, max_k: the longest.
        keys: int64 [sum of key lengths], rows of the rank-major gathered keys; None without context parallelism, where
            keys are in the order of the tokens.
        padded: for `by_groups`; None where a variable-length kernel does its work.
    """

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    keys: torch.Tensor | None
    padded: Padded | None


def segments(boundaries: list[int], cp_size: int, cp_rank: int, device: torch.device,
             padded: bool = True) -> Segments:
    """Lay out a pack.

    Args:
        boundaries: [sequences + 1], padded starts of the whole pack's sequences and its end, tokens; each length a
            multiple of 2 * cp_size if cp_size > 1. Empty sequences are allowed.
        cp_size, cp_rank: degree of context parallelism and this rank.
        device: of the resulting tensors; copies to it do not wait for its queue.
        padded: whether `by_groups` will be used. With context parallelism its masks grow with queries x keys.
    """
    queries, keys = _rows(boundaries, cp_size, cp_rank)

    def cumulative(rows: list[np.ndarray]) -> torch.Tensor:
        return _to(np.cumsum([0, *map(len, rows)]).astype(np.int32), device)

    return Segments(
        cu_q=cumulative(queries), cu_k=cumulative(keys), max_q=max(map(len, queries), default=0),
        max_k=max(map(len, keys), default=0), keys=_index(keys, device) if cp_size > 1 else None,
        padded=_pad(queries, keys, device) if padded else None)


def _pad(queries: list[np.ndarray], keys: list[np.ndarray], device: torch.device) -> Padded:
    """The padded groups of these segments."""
    order, groups = _group(queries, keys, device)
    output_rows = np.empty(sum(map(len, queries)), dtype=np.int64)
    start = 0
    for (i, size, _) in order:
        output_rows[queries[i]] = start + np.arange(len(queries[i]))
        start += size
    return Padded(_index([_padded(queries[i], size) for i, size, _ in order], device),
                  _index([_padded(keys[i], size) for i, _, size in order], device), _to(output_rows, device), groups)


def _index(parts: list[np.ndarray], device: torch.device) -> torch.Tensor:
    return _to(np.concatenate(parts) if parts else np.empty(0, np.int64), device)


def _to(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)


def _rows(boundaries: list[int], cp_size: int, cp_rank: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """For each segment, its queries' rows among this rank's tokens and its keys' rows among all (rank-major)."""
    queries, keys = [], []
    total = boundaries[-1] - boundaries[0]
    for start, end in zip(boundaries[:-1], boundaries[1:], strict=True):
        if end == start:
            continue
        if cp_size == 1:
            queries.append(np.arange(start, end))
            keys.append(queries[-1])
            continue
        if (end - start) % (2 * cp_size):
            raise ValueError(f"a sequence of {end - start} tokens is not a multiple of {2 * cp_size}")
        local, chunk = start // cp_size, (end - start) // (2 * cp_size)
        position = np.arange(end - start)
        part, offset = position // chunk, position % chunk
        rank = np.where(part < cp_size, part, 2 * cp_size - 1 - part)
        rows = rank * (total // cp_size) + local + np.where(part < cp_size, 0, chunk) + offset
        for half, number in enumerate((cp_rank, 2 * cp_size - 1 - cp_rank)):
            queries.append(local + half * chunk + np.arange(chunk))
            keys.append(rows[:(number + 1) * chunk])
    return queries, keys


def _group(queries: list[np.ndarray], keys: list[np.ndarray],
           device: torch.device) -> tuple[list[tuple[int, int, int]], tuple[Group, ...]]:
    """Which segments go together: [(segment, padded queries, padded keys)] in order, and the groups."""
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, (q, k) in enumerate(zip(queries, keys, strict=True)):
        members[round_up(len(q)), round_up(len(k))].append(i)
    order, groups = [], []
    for (q_size, k_size), which in sorted(members.items()):
        # one segment, or segments of one length, need no padding
        q_size, k_size = max(len(queries[i]) for i in which), max(len(keys[i]) for i in which)
        order += [(i, q_size, k_size) for i in which]
        mask = None
        if any(len(queries[i]) != len(keys[i]) for i in which):
            shift = _to(np.array([len(keys[i]) - len(queries[i]) for i in which]), device)[:, None, None, None]
            mask = torch.arange(k_size, device=device) <= torch.arange(q_size, device=device)[:, None] + shift
        groups.append(Group(len(which), q_size, k_size, mask))
    return order, tuple(groups)


def round_up(length: int) -> int:
    """To a multiple of a quarter of the power of two below, at least 8: at most 25 % of padding above 32 tokens."""
    step = max(8, 1 << max(length.bit_length() - 3, 0))
    return -(-length // step) * step


def _padded(rows: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate((rows, np.full(size - len(rows), rows[-1])))


def by_groups(query_thd: torch.Tensor, key_thd: torch.Tensor, value_thd: torch.Tensor, pack: Segments,
              scale: float | None) -> torch.Tensor:
    """Attention with SDPA over the padded groups of `pack`; keys and values as gathered (rank-major).

    Padding repeats a segment's last row to the right, where the causal mask hides it from real queries.
    """
    padded = pack.padded
    if query_thd.device.type != "cpu":  # an accelerator's fp32 kernel that does not keep all scores shares no keys
        key_thd, value_thd = (x.repeat_interleave(query_thd.size(1) // x.size(1), 1) for x in (key_thd, value_thd))
    query_rows, key_rows, value_rows = (
        x.index_select(0, rows) for x, rows in ((query_thd, padded.query_rows), (key_thd, padded.key_rows),
                                                (value_thd, padded.key_rows)))
    outputs, q_start, k_start = [], 0, 0
    for group in padded.groups:
        q_end, k_end = q_start + group.segments * group.queries, k_start + group.segments * group.keys
        query = query_rows[q_start:q_end].unflatten(0, (group.segments, group.queries)).transpose(1, 2)
        key, value = (x[k_start:k_end].unflatten(0, (group.segments, group.keys)).transpose(1, 2)
                      for x in (key_rows, value_rows))
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=group.mask, is_causal=group.mask is None,
                                                scale=scale, enable_gqa=query.size(1) != key.size(1))
        outputs.append(output.transpose(1, 2).flatten(0, 1))
        q_start, k_start = q_end, k_end
    return torch.cat(outputs).index_select(0, padded.output_rows)
