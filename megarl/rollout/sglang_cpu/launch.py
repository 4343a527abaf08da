"""`python launch.py ARGUMENTS`: `sglang.launch_server` on a CPU, with SGLang's own arguments.

A script, and its shim a top-level module beside it: SGLang spawns its scheduler, which imports this file again as
`__mp_main__`, so that the shim is in every process before anything of SGLang is.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import shim  # noqa: E402

shim.prepare()

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402
from sglang.srt.mem_cache.pool_host import common  # noqa: E402

shim.batch_decoding(TorchNativeAttnBackend)
shim.leave_memory_pageable(common)


def main() -> None:
    """As `sglang.launch_server` does; whatever ends it ends its children."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    arguments = prepare_server_args(sys.argv[1:])
    shim.share_cores(arguments.tp_size)
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
