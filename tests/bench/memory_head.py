"""Peak memory of head + log-prob + entropy, forward and backward: megarl's fused head against plain torch.

    python tests/bench/memory_head.py [--vocab 32768] [--hidden 256] [--chunk-tokens 1024]

What is measured: each line is a fresh process (one thread, fp32, CPU) that makes its inputs and runs a small case of
the same code to load the libraries; then `baseline` is its resident memory, and `peak` is how far its largest resident
memory (ru_maxrss) went above that during one forward and backward of sum(a * logprobs + b * entropy). Inputs (hidden
states, weight, labels, a, b) lie in the baseline; the gradients of hidden states and weight are in the peak of both
sides. `extra` is the peak without those gradients, which are as large as the inputs. Plain torch means
log_softmax(h @ W^T), gather, and -(p log p) summed, under autograd.

Asked for: at 4096 tokens a peak of at most 1/8 of plain torch's, and an `extra` that is flat from 4096 to 16384 tokens.
The exit status is 1 if one of the two is missed (flat: within 10 %).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path


def measure(kind: str, tokens: int, vocab: int, hidden: int, chunk_tokens: int) -> dict[str, float]:
    """One forward and backward in this process: peak and extra in MiB, seconds."""
    import time

    import torch

    from megarl.model.head import token_logprobs

    torch.set_num_threads(1)

    def step(hidden_th, weight_vh, labels_t, a_t, b_t):
        if kind == "fused":
            logprobs_t, entropy_t = token_logprobs(hidden_th, weight_vh, labels_t, vocab_size=len(weight_vh),
                                                   chunk_tokens=chunk_tokens)
        else:
            logp_tv = torch.log_softmax(hidden_th @ weight_vh.T, -1)
            logprobs_t, entropy_t = logp_tv.gather(1, labels_t[:, None]).squeeze(1), -(logp_tv.exp() * logp_tv).sum(-1)
        (a_t @ logprobs_t + b_t @ entropy_t).backward()

    def inputs(n, v):
        return (torch.randn(n, hidden, requires_grad=True), (torch.randn(v, hidden) / hidden**0.5).requires_grad_(),
                torch.randint(v, (n,)), torch.randn(n), torch.randn(n))

    step(*inputs(8, 64))
    given = inputs(tokens, vocab)
    baseline = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    start = time.perf_counter()
    step(*given)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - baseline
    gradients = sum(t.grad.numel() * t.grad.element_size() for t in given[:2])
    return {"peak": peak / 2**20, "extra": (peak - gradients) / 2**20, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument("--one", nargs=2, metavar=("KIND", "TOKENS"), help="measure in this process, print JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]), args.vocab, args.hidden, args.chunk_tokens)))
        return 0
    results = {}
    print(f"vocabulary {args.vocab}, hidden {args.hidden}, chunks of {args.chunk_tokens} tokens, fp32, MiB")
    for kind, tokens in (("plain", 4096), ("fused", 4096), ("fused", 8192), ("fused", 16384)):
        out = subprocess.run([sys.executable, __file__, "--one", kind, str(tokens), "--vocab", str(args.vocab),
                              "--hidden", str(args.hidden), "--chunk-tokens", str(args.chunk_tokens)],
                             check=True, capture_output=True, text=True).stdout
        results[kind, tokens] = r = json.loads(out)
        print(f"{kind} {tokens:6d} tokens: peak {r['peak']:7.0f}  extra {r['extra']:7.0f}  {r['seconds']:6.2f} s")
    ratio = results["plain", 4096]["peak"] / results["fused", 4096]["peak"]
    growth = results["fused", 16384]["extra"] / results["fused", 4096]["extra"]
    print(f"plain / fused peak at 4096 tokens: {ratio:.1f} (asked: 8); extra at 16384 over 4096 tokens: {growth:.2f}")
    return 0 if ratio >= 8 and growth <= 1.1 else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
