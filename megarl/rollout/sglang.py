"""Real SGLang as an engine: how its server is started, on GPUs and on a CPU."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.cluster import device
from megarl.config.schema import Config
from megarl.config.sglang import python

_ON_CPU = Path(__file__).with_name("sglang_cpu") / "launch.py"
# Where SGLang's own defaults do not fit; a config may change them.
_DEFAULTS = {"log_level_http": "warning"}  # else a line in the log for each request
_CPU_DEFAULTS = {"device": "cpu", "attention_backend": "torch_native", "disable_overlap_schedule": True,
                 "skip_server_warmup": True, "max_total_tokens": 1 << 16}  # its own: from the host's free memory


def server_command(config: Config, common: list[str], gpu: int, version: str) -> list[str]:
    """The command line of a server: `sglang.launch_server`, on a CPU behind megarl's shim.

    Args:
        config: the options in `sglang` pass through under their own names.
        common: arguments that embedded engines take as well.
        gpu: number on its host of the engine's first GPU, unless `sglang.base_gpu_id` is set.
        version: `<name of the engine and its incarnation>-<process>`. Every incarnation draws other random numbers.
    """
    seed = zlib.crc32(f"{config.run.seed}/{version.rpartition('-')[0]}".encode())
    on_cpu = config.cluster.device == "cpu" or (config.cluster.device == "auto" and device.kind() == "cpu")
    options = {**_DEFAULTS, "random_seed": seed & 0x7FFFFFFF, **(_CPU_DEFAULTS if on_cpu else {"base_gpu_id": gpu}),
               **config.sglang}
    program = [str(_ON_CPU)] if on_cpu else ["-m", "sglang.launch_server"]
    return [python(config), *program, *common, *flags(options)]


def flags(options: Mapping[str, Any]) -> list[str]:
    """`{"tp_size": 2, "disable_radix_cache": True}` -> `--tp-size 2 --disable-radix-cache`.

    False and None give nothing, a list its entries one by one, a mapping its JSON.
    """
    found = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        found.append("--" + name.replace("_", "-"))
        if isinstance(value, dict):
            found.append(json.dumps(value))
        elif isinstance(value, list):
            found += [str(item) for item in value]
        elif value is not True:
            found.append(str(value))
    return found
