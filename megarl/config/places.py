"""Where weights lie on their way to engines."""

from __future__ import annotations

import zlib
from pathlib import Path

from megarl.config.schema import Config

_MEMORY = Path("/dev/shm")


def weights_directory(config: Config) -> Path:
    """Where the disk transport writes: a directory of this run alone, also below one that runs share."""
    run = Path(config.run.dir).absolute()
    return Path(config.sync.directory).absolute() / _name(run) if config.sync.directory else run / "weights"


def relay_directory(config: Config, engine: str) -> Path:
    """Where an engine's relay keeps its copy: in the memory of its host, if `sync.directory` names no other place."""
    run = Path(config.run.dir).absolute()
    base = Path(config.sync.directory).absolute() if config.sync.directory else _MEMORY
    return (base / _name(run) if base.is_dir() or config.sync.directory else run / "weights") / engine


def _name(run: Path) -> str:
    return f"megarl-{run.name}-{zlib.crc32(str(run).encode()):08x}"
