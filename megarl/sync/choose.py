"""The transport that a config asks for."""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.checkpoint.hf_export import is_source
from megarl.cluster import device
from megarl.config.places import weights_directory
from megarl.config.schema import Config
from megarl.sync.broadcast import Broadcast
from megarl.sync.crew import Crew
from megarl.sync.delta_transport import Delta, Relayed
from megarl.sync.disk import Disk
from megarl.sync.transport import Transport

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make_transport(config: Config, crew: Crew, address: str, generation: str) -> Transport:
    """One of `sync.transport`. Collective over the trainers.

    Args:
        config: used are sync, run.dir, model, rollout.engine, sglang.
        crew: the trainers.
        address: under which engines reach this host.
        generation: of this life of the job.
    """
    from megatron.core import parallel_state

    sync, sglang, source = config.sync, config.rollout.engine == "sglang", is_source()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    load_format = "auto" if config.sglang.get("load_format") == "dummy" else None
    if sync.transport == "disk":
        return Disk(crew, stage=stage, is_source=source, directory=weights_directory(config),
                    model=Path(config.model.path), load_format=load_format, timeout_s=sync.timeout_s)
    if sync.transport == "delta":
        common = dict(is_source=source, dtype=_DTYPES[config.model.dtype], message_bytes=sync.bucket_mb << 20,
                      timeout_s=sync.timeout_s)
        return Relayed(crew, load_format=load_format, **common) if sglang else Delta(crew, **common)
    return Broadcast(
        crew, stage=stage, stages=parallel_state.get_pipeline_model_parallel_world_size(), is_source=source,
        name=f"megarl-{generation}", address=address,
        ranks_per_engine=int(config.sglang.get("tp_size", 1)) if sglang else 1,
        on_cpu=not sglang or device.kind() == "cpu", bucket_bytes=sync.bucket_mb << 20, timeout_s=sync.timeout_s)
