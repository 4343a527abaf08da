"""Changed weights through a relay, to an engine that loads whole checkpoints (here an embedded one)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import ROOT
from models import save_hf_model
from test_publish import DENSE, call, exported, trainers
from worlds import run_world

from megarl.config.layout import Layout
from megarl.config.places import relay_directory
from megarl.rollout.process import engine_environment
from megarl.rollout.relay.command import needs_relay, with_relay
from megarl.sync.checksum import tensor_checksum


class Pair:
    """An embedded engine and its relay, as a supervisor starts them."""

    def __init__(self, config: Any, model: Path) -> None:
        command = [sys.executable, "-m", "megarl.rollout.embedded", "--model-path", str(model), "--port", "0"]
        command, self.relay = with_relay(config, command, "0.0", "127.0.0.1")
        env = {**engine_environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        self.url = None
        while self.url is None:
            line = self.process.stdout.readline()
            assert line, "the engine ended"
            found = re.search(r"http://\S+", line)
            self.url = found and found.group()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def relayed(config: Any, run: Path) -> Any:
    """The config of a run with SGLang and changes, for the parts that look at it."""
    changes = {"run": {"dir": str(run)}, "cluster": {"device": "cpu"}, "rollout": {"engine": "sglang"},
               "sync": {"transport": "delta", "verify": False, "directory": str(run / "copies")}}
    return config.model_copy(update={name: getattr(config, name).model_copy(update=section)
                                     for name, section in changes.items()})


def trainer(rank: int, model: Path, folder: Path, url: str, relay: str) -> dict[str, Any]:
    from types import SimpleNamespace

    from megarl.checkpoint.hf_export import save_hf
    from megarl.rollout.fleet import EngineRecord
    from megarl.sync.publish import WeightPublisher

    layout, found = Layout(1), {"sums": [], "files": []}
    chunks, hf, config = trainers(layout, model)
    record = EngineRecord("0.0", 1, url, "up", relay=relay)
    fleet = SimpleNamespace(engines=lambda: [record], mark_synced=lambda *_: None, condemn=lambda *_: None)
    publisher = WeightPublisher(chunks, hf, relayed(config, folder), address="127.0.0.1", generation="r", fleet=fleet)
    sizes = []
    for number in range(4):
        if number == 3:  # as if it had been started again
            call(relay, "/update_weight_version", {"new_version": "somebody else's"})
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.view(-1)[number::7] *= 1.01
        sizes.append(publisher.publish(f"r:{number}").bytes)
        found["files"].append(len(list(Path(call(relay, "/model_info")["model_path"]).glob("*.safetensors"))))
        save_hf(chunks, hf, layout, model, folder / f"export{number}")
        found["sums"].append([call(where, "/weights_checker", {"action": "checksum"})["checksums"]
                              for where in (url, relay)])
    publisher.close()
    versions = [call(where, "/model_info")["weight_version"] for where in (url, relay)]
    return found | {"sizes": sizes, "versions": versions}


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("relay")
    model, other = (save_hf_model("llama", folder / f"model{seed}", seed, **DENSE) for seed in (0, 1))
    from models import config_for

    config = relayed(config_for(model), folder)
    assert needs_relay(config) and not needs_relay(config_for(model))
    with Pair(config, other) as pair:
        copy = relay_directory(config, "0.0")
        found = run_world(1, trainer, model, folder, pair.url, pair.relay)[0]
        assert copy.is_dir()
        pair.process.terminate()
        found["ended"] = [pair.process.wait(20), copy.exists()]
    with Pair(config, other) as pair:
        children = Path(f"/proc/{pair.process.pid}/task/{pair.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        found["killed"] = [pair.process.wait(20), copy.exists()]
    return found | {"folder": folder}


def test_engine_and_copy_hold_every_tensor(published):
    for number, sums in enumerate(published["sums"]):
        tensors = exported(published["folder"] / f"export{number}")
        expected = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
        assert sums == [expected, expected], number
    assert published["versions"] == ["r:3", "r:3"]
    size = sum(tensor.nbytes for tensor in tensors.values())
    first, second, third, resync = published["sizes"]
    assert size < first < 1.1 * size and size < resync < 1.1 * size and max(second, third) < 0.35 * size
    assert published["files"] == published["files"][:1] * 4  # one for each message of the first time, none afterwards


def test_the_pair_ends_as_the_engine_ends(published):
    assert published["ended"] in ([0, False], [-signal.SIGTERM, False])
    assert published["killed"] == [-signal.SIGKILL, False]
