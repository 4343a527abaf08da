"""One optimizer step: log-probs, forward-backward, clipping, gates."""
