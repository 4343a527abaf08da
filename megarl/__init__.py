"""megarl: Megatron-based 3D-parallel RL training of language models, with SGLang doing the sampling."""

__version__ = "0.1.0"
