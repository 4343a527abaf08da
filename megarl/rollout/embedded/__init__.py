"""The embedded CPU engine, `python -m megarl.rollout.embedded`: a small decoder behind SGLang's HTTP protocol."""
