"""On a GPU: variable-length kernels, and Transformer Engine's layers against the local ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import models
import pytest
import torch

SEQUENCES = [[int(t) for t in torch.randint(2, 99, (n,), generator=torch.Generator().manual_seed(n))]
             for n in (5, 17, 130, 8)]


@pytest.mark.parametrize("size, rank", [(1, 0), (2, 0), (2, 1)])
def test_varlen_kernel_equals_groups(where: str, size: int, rank: int) -> None:
    """Output and gradients in bf16, for one context rank of `size`."""
    from megarl.model.attention import varlen_kernel
    from megarl.model.segments import by_groups, segments

    bounds = [0, 4, 24, 284, 284, 300]
    pack = segments(bounds, size, rank, torch.device(where))
    q, k, v = (torch.randn(n, heads, 64, device=where, dtype=torch.bfloat16, requires_grad=True)
               for n, heads in ((300 // size, 4), (300, 2), (300, 2)))
    kernel = varlen_kernel(where, torch.bfloat16)
    if where == "cpu":
        pytest.skip("a CPU has no such kernel")
    assert kernel is not None
    keys, values = (x if pack.keys is None else x.index_select(0, pack.keys) for x in (k, v))
    results = []
    for out in (by_groups(q, k, v, pack, None), kernel(q, keys, values, pack, None)):
        grads = torch.autograd.grad(out.float().square().sum(), (q, k, v), retain_graph=True)
        results.append((out, *grads))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", models.FAMILIES)
def test_transformer_engine_equals_local(groups: Any, where: str, name: str, tmp_path: Path) -> None:
    """Hidden states, every gradient by its Hugging Face name, and the export, in bf16."""
    from megarl.checkpoint.hf_export import iter_hf_tensors
    from megarl.checkpoint.hf_import import load_hf
    from megarl.model.build import build_chunks
    from megarl.model.hf_config import HFConfig

    second = "local" if where == "cpu" else "transformer_engine"
    if where != "cpu" and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs transformer-engine")
    models.save_hf_model(name, tmp_path, dtype=torch.bfloat16, hidden_size=128, num_attention_heads=4, head_dim=32)
    hf, seen = HFConfig.read(tmp_path), []
    batch = models.pack(SEQUENCES, total=192)
    for key in ("tokens_t", "positions_t", "padding_t"):
        setattr(batch, key, getattr(batch, key).to(where))
    for implementation in ("local", second):
        chunks = build_chunks(hf, models.config_for(tmp_path, dtype="bf16", implementation=implementation),
                              groups.layout)
        load_hf(chunks, tmp_path, hf)
        exported = {key: tensor.clone() for key, tensor in iter_hf_tensors(chunks, hf)}
        if chunks[0].routers:
            chunks[0].routers.set_step(torch.full((hf.layers, hf.experts), 1 / hf.experts), 160)
        hidden = chunks[0](batch)
        (hidden[:160, 0] @ chunks[0].head_weight().T).float().square().mean().backward()
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.copy_(parameter.grad)
        seen.append((hidden[:160].detach(), exported, dict(iter_hf_tensors(chunks, hf))))
    (local, weights, grads), (te, te_weights, te_grads) = seen
    torch.testing.assert_close(local, te, rtol=5e-2, atol=5e-2)
    assert weights.keys() == te_weights.keys()
    for key, tensor in weights.items():
        assert torch.equal(tensor, te_weights[key]), key
        error, largest = (grads[key].float() - te_grads[key].float()).norm(), grads[key].float().norm()
        assert error <= 0.1 * largest + 1e-6, key
