"""How an engine is started with a relay."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress

from megarl.config.places import relay_directory
from megarl.config.schema import Config
from megarl.rollout.process import free_port, socket_address


def needs_relay(config: Config) -> bool:
    """Whether engines get changed weights and cannot take them by themselves."""
    return config.rollout.engine == "sglang" and config.sync.transport == "delta"


def with_relay(config: Config, command: Sequence[str], engine: str, address: str) -> tuple[list[str], str]:
    """(the engine's command with its relay, the relay's address).

    Args:
        config: used are model.path and what names the copy's directory.
        command: the engine's.
        engine: its id.
        address: of the interface to listen on.
    """
    port = free_port(address)
    return [sys.executable, "-m", "megarl.rollout.relay", "--model-path", config.model.path, "--directory",
            str(relay_directory(config, engine)), "--host", address, "--port", str(port), "--", *command], (
        f"http://{socket_address(address, port)}")


def remove_copy(config: Config, engine: str) -> None:
    """What a relay that was killed has left in its host's memory."""
    if needs_relay(config):
        directory = relay_directory(config, engine)
        shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):  # other engines' copies may lie beside it
            directory.parent.rmdir()
