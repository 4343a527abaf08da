"""Changed weights for engines that take whole checkpoints only: a copy beside the engine, on its host.

SGLang loads whole tensors, and keeps fused shards from which the old tensors cannot be had back. The relay has them as
files (in memory, where the host has a file system for that): it takes changes by HTTP as an embedded engine does, and
writes them into its files; the trainers then have the engine load these. It runs the engine's command as its child.
"""
