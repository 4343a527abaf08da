"""HF config -> Megatron GPTModel chunks; families and their weight names; packed attention; the head."""
