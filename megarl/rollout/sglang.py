"""Real SGLang as an engine: how its server is started, on GPUs and on a CPU."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.cluster import device
from megarl.cluster.keys import Keys
from megarl.config.schema import Config
from megarl.config.sglang import python

_ON_CPU = Path(__file__).with_name("sglang_cpu") / "launch.py"
# Where SGLang's own defaults do not fit; a config may change them.
_DEFAULTS = {"log_level_http": "warning"}  # else a line in the log for each request
_CPU_DEFAULTS = {"device": "cpu", "attention_backend": "torch_native", "disable_overlap_schedule": True,
                 "skip_server_warmup": True, "max_total_tokens": 1 << 16}  # its own: from the host's free memory


@dataclass(frozen=True)
class Part:
    """One host's part of an engine that is spread over several.

    Attributes:
        node, nodes: which part, of how many; part 0 has the server.
        meeting: `host:port` where the parts meet, on part 0's host.
    """

    node: int
    nodes: int
    meeting: str


def on_cpu(config: Config) -> bool:
    """Whether engines run on a CPU."""
    return config.cluster.device == "cpu" or (config.cluster.device == "auto" and device.kind() == "cpu")


def server_command(config: Config, common: list[str], gpu: int, version: str, part: Part | None = None,
                   keys_file: Path | None = None) -> list[str]:
    """The command line of a server: `sglang.launch_server`, on a CPU behind megarl's shim.

    Args:
        config: the options in `sglang` pass through under their own names.
        common: arguments that embedded engines take as well.
        gpu: number on its host of the engine's first GPU, unless `sglang.base_gpu_id` is set.
        version: `<name of the engine and its incarnation>-<process>`. Every incarnation draws other random numbers.
        part: of an engine that is spread over several hosts.
        keys_file: from `write_keys`.
    """
    seed = zlib.crc32(f"{config.run.seed}/{version.rpartition('-')[0]}".encode())
    cpu = on_cpu(config)
    options = {**_DEFAULTS, "random_seed": seed & 0x7FFFFFFF, **(_CPU_DEFAULTS if cpu else {"base_gpu_id": gpu}),
               **config.sglang}
    if part is not None:
        options |= {"nnodes": part.nodes, "node_rank": part.node, "dist_init_addr": part.meeting}
    if keys_file is not None:
        options["config"] = str(keys_file)
    program = [str(_ON_CPU)] if cpu else ["-m", "sglang.launch_server"]
    return [*config.rollout.sglang_prefix, python(config), *program, *common, *flags(options)]


def write_keys(path: Path, keys: Keys) -> None:
    """Write a file for SGLang's `--config`: everybody sees a command line, this user alone can read the file.

    Args:
        path: must end in .yaml.
        keys: at least one for sampling.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"api-key": keys.api, **({"admin-api-key": keys.admin} if keys.admin else {})}, file)


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
