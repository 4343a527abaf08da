"""SGLang on a CPU, for tests: its own server and scheduler, started where its compiled kernels are not.

The files here run in SGLang's environment (`launch/setup_sglang.sh` makes one) and import nothing of megarl.
"""
