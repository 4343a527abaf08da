"""The reference model of a KL term: its weights wait in host memory and change places with the policy's when needed.

There is one GPTModel; only parameter values move. Nothing else of the model may be in flight meanwhile: no backward
pass between forward and swap, no overlapped parameter gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megarl.cluster import device
from megarl.model.chunk import unwrapped


class HostWeights:
    """A host copy of some chunks' weights, as they are when this is made."""

    @torch.no_grad()
    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Copy all weights of `chunks` (bare or in DDP) to the host; pinned where there is an accelerator."""
        self.parameters = [weight for chunk in chunks for weight in unwrapped(chunk).weights().values()]
        pinned = device.kind() != "cpu"
        self.host = [torch.empty_like(parameter, device="cpu", pin_memory=pinned) for parameter in self.parameters]
        for host, parameter in zip(self.host, self.parameters, strict=True):
            host.copy_(parameter)
        self.inside = False

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the context the chunks compute with the kept weights; afterwards with their own, bit for bit.

        Values are exchanged in place, so parameters that are views into DDP's or the optimizer's buffers stay so. The
        host memory holds the policy meanwhile; the device needs room for one more parameter at a time.
        """
        if self.inside:
            raise RuntimeError("the reference weights are swapped in already")
        self._exchange()
        self.inside = True
        try:
            yield
        finally:
            self._exchange()
            self.inside = False

    @torch.no_grad()
    def _exchange(self) -> None:
        for host, parameter in zip(self.host, self.parameters, strict=True):
            mine = parameter.detach().clone()
            parameter.copy_(host, non_blocking=True)
            host.copy_(mine, non_blocking=True)  # queued behind the copy above, which reads the same memory
        device.synchronize()
