"""The objective as pure tensor functions: advantages, policy losses, KL, corrections. No ranks, no model."""
