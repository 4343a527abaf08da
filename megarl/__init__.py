"""megarl: Megatron-based 3D-parallel RL training of language models, with sampling in a partition of its own."""

__version__ = "0.1.0"
