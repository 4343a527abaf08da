"""Changed weights: lossless to the bit, small where little changed, and nothing that does not fit is applied."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.sync import delta
from megarl.sync.checksum import tensor_checksum


def stepped(old: torch.Tensor, lr: float, seed: int = 0) -> torch.Tensor:
    """fp32 master weights that lay anywhere within their bf16 rounding, moved by `lr` each, as Adam moves them."""
    generator = torch.Generator().manual_seed(seed)
    ulp = 2.0 ** (torch.frexp(old.float())[1] - 8)
    master = old.float() + (torch.rand(old.shape, generator=generator) - 0.5) * ulp
    master = torch.where(master.to(old.dtype) == old, master, old.float())  # below a power of two they lie closer
    return (master + lr * torch.randn(old.shape, generator=generator).sign()).to(old.dtype)


def travelled(changes: list[delta.Change], base: str | None, targets: dict[str, torch.Tensor], size: int = 1 << 20,
              ) -> int:
    """Send, receive and apply; the bytes that travelled."""
    total = 0
    for message in delta.messages(changes, base, size):
        total += len(message)
        found, parts = delta.read_message(message)
        assert found == base
        for part in parts:
            delta.apply(part, targets[part.name])
    return total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.3, 0.7, 1.0])
def test_lossless_to_the_bit(dtype: torch.dtype, share: float):
    generator = torch.Generator().manual_seed(1)
    old = torch.randn(97, 301, generator=generator).to(dtype)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    some = torch.rand(old.shape, generator=generator) < share
    noise = torch.randint(torch.iinfo(kind).min, torch.iinfo(kind).max, old.shape, generator=generator, dtype=kind)
    new = torch.where(some, noise, old.view(kind)).view(dtype)  # any bits: NaNs and infinities among them
    change = delta.compare("w", new, old)
    assert change.kind == ("same" if share == 0 else "sparse" if share < 0.5 else "whole")
    assert change.count == (old.numel() if change.kind == "whole" else int((new.view(kind) != old.view(kind)).sum()))
    holder = old.t().contiguous().t()  # as a fused weight holds it: other strides
    assert not holder.is_contiguous()
    travelled([change], "g:1", {"w": holder})
    assert tensor_checksum(holder) == tensor_checksum(new)


def test_signs_of_zero_and_single_changes_at_both_ends():
    old = torch.zeros(1000, dtype=torch.bfloat16)
    new = old.clone()
    new[0], new[999], new[500] = -0.0, float("nan"), 3.0
    change = delta.compare("w", new, old)
    assert change.kind == "sparse" and change.count == 3 and change.gap_bytes == 2
    travelled([change], "g:1", {"w": old})
    assert tensor_checksum(old) == tensor_checksum(new)
    assert delta.compare("w", new, new.clone()).kind == "same"  # a NaN equals itself
    scalar = torch.tensor(1.5)
    travelled([delta.compare("s", torch.tensor(2.5), scalar)], "g:1", {"s": scalar})
    assert scalar == 2.5


def test_small_steps_in_bf16_are_few_bytes():
    old = (0.02 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(2))).bfloat16()
    new = stepped(old, 1e-6)
    change = delta.compare("w", new, old)
    share = int((new != old).sum()) / old.numel()
    # a step of 1e-6 crosses a rounding border with the chance 1e-6 / ulp
    expected = float((1e-6 / 2.0 ** (torch.frexp(old.float())[1] - 8)).clamp(max=1.0).mean())
    assert share == pytest.approx(expected, rel=0.02) and change.count == round(share * old.numel())
    entropy = share * math.log2(1 / share) + (1 - share) * math.log2(1 / (1 - share)) + share  # where, and which way
    print(f"{share:.2%} changed, {change.bytes / old.nbytes:.2%} of the bytes, "
          f"{8 * change.bytes / (entropy * old.numel()):.2f} of the entropy")
    assert change.bytes < 0.03 * old.nbytes and 8 * change.bytes < 1.45 * entropy * old.numel()


def test_messages_hold_what_they_should():
    tensors = {f"w{n}": torch.full((100,), float(n)) for n in range(5)}
    changes = [delta.whole(name, tensor) for name, tensor in tensors.items()]
    parts = list(delta.messages(changes, None, 850))
    assert [[change.name for change in delta.read_message(part)[1]] for part in parts] == [
        ["w0", "w1"], ["w2", "w3"], ["w4"]]
    targets = {name: torch.zeros(100, dtype=torch.bfloat16) for name in tensors}  # a whole tensor is cast
    assert travelled(changes, None, targets, 1) > 5 * 400
    assert all(bool((targets[name] == tensor).all()) for name, tensor in tensors.items())


def test_what_does_not_fit_is_refused():
    old = torch.zeros(64, dtype=torch.bfloat16)
    new = old.clone()
    new[3] = 1.0
    change = delta.compare("w", new, old)
    (message,) = delta.messages([change], "g:1", 100)
    for wrong, what in [(message[:-1], "bytes"), (message + b"x", "bytes"), (b"", "message"), (b"\1" * 40, "message"),
                        (next(delta.messages([change], None, 100)), "start from")]:
        with pytest.raises(ValueError, match=what):
            delta.read_message(wrong)
    damaged = delta.read_message(message[:-3] + b"\0\0\0")[1][0]
    for call, what in [((change, old[:32]), "shape"), ((change, old.float()), "held in float32"),
                       ((damaged, old), "w: ")]:
        with pytest.raises(ValueError, match=what):
            delta.apply(*call)
    assert not old.any()
