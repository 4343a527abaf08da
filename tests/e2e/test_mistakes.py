"""Bad inputs: each is told once, with its place and what would be right, ends with status 64 and leaves no process.

A case is a line: what is spoiled in the good config or its files, the overrides, and what the error must say.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from good_config import MODEL, write_good

from megarl.config.__main__ import main as config_main
from megarl.errors import run_main

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        says: parts of the error, in order; F stands for the folder.
        overrides: of the good config.
        spoil: done to the folder first.
        environ: variables to set.
    """

    says: list[str | tuple[str, ...]]
    overrides: list[str] = field(default_factory=list)
    spoil: Callable[[Path], object] = lambda folder: None
    environ: dict[str, str] = field(default_factory=dict)


def add_line(text: str) -> Callable[[Path], object]:
    """Append to the config file."""
    def spoil(folder: Path) -> None:
        with (folder / "config.yaml").open("a") as file:
            file.write(text)
    return spoil


def write(name: str, text: str) -> Callable[[Path], object]:
    """Replace a file."""
    return lambda folder: (folder / name).write_text(text)


def remove(name: str) -> Callable[[Path], object]:
    """Remove a file or a folder."""
    def spoil(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return spoil


def cut(name: str) -> Callable[[Path], object]:
    """Take the last bytes off a file."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


def rename(files: str, name: str) -> Callable[[Path], object]:
    """Call a tensor something else in some files of the model."""
    def spoil(folder: Path) -> None:
        for path in (folder / "model").glob(files):
            path.write_bytes(path.read_bytes().replace(f'"{name}"'.encode(), f'"{"x" * len(name)}"'.encode()))
    return spoil


CHECKED = {  # what `python -m megarl.config check` finds
    "unknown key": Case(["override: parallel.tensr: unknown key; did you mean parallel.tensor?"], ["parallel.tensr=2"]),
    "unknown section": Case(["config.yaml:", "optimizer: unknown key; did you mean optim?"],
                            spoil=add_line("optimizer:\n  lr: 1\n")),
    "wrong type": Case(["override: batch.minibatches: 'two' is not a whole number above 0"], ["batch.minibatches=two"]),
    "nothing scores": Case(["reward.terms: no reward term applies to the data source 'train'", "add a term"],
                           spoil=lambda f: write("config.yaml", (f / "config.yaml").read_text()
                                                 .replace("reward:\n  terms:\n  - name: exact\n", ""))(f)),
    "missing section": Case(["config.yaml: data: is missing (training prompts); give a section"],
                            spoil=lambda f: write("config.yaml", yaml.safe_dump(
                                {key: value for key, value in yaml.safe_load((f / "config.yaml").read_text()).items()
                                 if key != "data"}))(f)),
    "key twice": Case(["config.yaml:", "optim stands here and in line"], spoil=add_line("optim:\n  lr: 1\n")),
    "not YAML": Case(["config.yaml:", "not YAML"], spoil=add_line("run: [\n")),
    "no config": Case(["F/config.yaml: cannot be read: No such file or directory"], spoil=remove("config.yaml")),
    "malformed override": Case(["override 'optim.lr': is not key.path=value"], ["optim.lr"]),
    "degrees do not divide": Case(["config.yaml:", " with parallel.tensor=2, parallel.context=2: parallel: tensor 2 x "
                                   "pipeline 1 x context 2 = 4 does not divide the 6 trainer ranks"],
                                  ["parallel.tensor=2", "parallel.context=2", "cluster.trainers=6"]),
    "more stages than layers": Case(["override: parallel.pipeline: 3 ranks with 1 stage each need 3 layers, the model "
                                     "has 2; use at most 2"], ["parallel.pipeline=3", "cluster.trainers=6",
                                                        "pipeline.schedule=1f1b"]),
    "heads do not divide": Case(["parallel.tensor: 4 does not divide the model's 2 key/value heads"],
                                ["parallel.tensor=4", "cluster.trainers=4", "parallel.expert=4"]),
    "experts do not divide": Case(["parallel.expert: 3 does not divide the model's 4 experts; use one of [1, 2]"],
                                  ["parallel.expert=3", "cluster.trainers=3"]),
    "minibatches do not divide": Case(["batch.minibatches: 3 does not divide the 4 groups of a step"],
                                      ["batch.minibatches=3"]),
    "world too small": Case(["cluster.trainers: 2 trainers + 1 rollouts = 3 ranks, but WORLD_SIZE is 2"],
                            environ={"WORLD_SIZE": "2"}),
    "no model": Case(["model.path: F/model is not a directory"], spoil=remove("model")),
    "unknown family": Case(["model family 'mamba' is not known", "known families: deepseek_v3, glm4_moe, llama"],
                           spoil=write("model/config.json", json.dumps({**MODEL, "model_type": "mamba"}))),
    "shard missing": Case(["model.path: F/model/model-00002-of-00002.safetensors is not there"],
                          spoil=remove("model/model-00002-of-00002.safetensors")),
    "shard cut short": Case(["F/model/model-00001-of-00002.safetensors is cut short"],
                            spoil=cut("model/model-00001-of-00002.safetensors")),
    "tensor missing": Case(["model.path: F/model/model-0000", "has no tensor model.norm.weight, which the index "
                            "promises"], spoil=rename("*.safetensors", "model.norm.weight")),
    "no tokenizer": Case(["model.path: F/model has no tokenizer"], spoil=remove("model/tokenizer.json")),
    "no data": Case(["data.sources.0.path: F/train.jsonl is not there"], spoil=remove("train.jsonl")),
    "empty data": Case(["data.sources.0.path: F/train.jsonl has no rows"], spoil=write("train.jsonl", "\n")),
    "bad JSON line": Case(["F/train.jsonl line 3: not JSON"],
                          spoil=write("train.jsonl", '{"prompt": "a", "label": "b"}\n\n{"prompt": "a"\n')),
    "no such column": Case(["F/train.jsonl line 1: no column 'question'; its columns are prompt, label"],
                           ["data.sources.0.prompt=question"]),
    "longer than the context": Case(["rollout.max_response_tokens: 60 after a prompt of up to 16 tokens",
                                     "more than the model's 64 positions; use at most 48"],
                                    ["rollout.max_response_tokens=60"]),
    "messages without a template": Case(
        ["F/train.jsonl line 1: the tokenizer of F/model has no chat template"],
        spoil=write("train.jsonl", '{"prompt": [{"role": "user", "content": "sort 1 ="}], "label": "b"}\n')),
    "text without a template": Case(["F/train.jsonl line 1: the tokenizer of F/model has no chat template"],
                                    ["data.chat_template=always", "eval.every=0", "eval.sets=[]"]),
    "messages and never a template": Case(
        ["F/train.jsonl line 1: the prompt is chat messages, but data.chat_template is never"],
        ["data.chat_template=never"],
        spoil=write("train.jsonl", '{"prompt": [{"role": "user", "content": "sort 1 ="}], "label": "b"}\n')),
    "all prompts too long": Case(["F/train.jsonl: all 20 prompts are longer than data.max_prompt_tokens (3); raise it"],
                                 ["data.max_prompt_tokens=3"]),
    "unknown reward": Case(["reward.terms.0.name: unknown reward function 'exakt'; did you mean exact"],
                           ["reward.terms.0.name=exakt"]),
    "unknown option of a reward": Case(["reward.terms.0.options: reward function 'exact' has no option 'strictly'"],
                                       ["reward.terms.0.options={strictly: 1}"]),
    "truncated sampling": Case(["rollout.top_p: 0.9 truncates the distribution"], ["rollout.top_p=0.9"]),
    "k1 in the loss": Case(["objective.kl.estimator: the gradient of k1 in the loss is 0"],
                           ["objective.kl={coefficient: 0.1, estimator: k1}"]),
    "pass@k above the samples": Case(["eval.sets.0.pass_at: pass@8 needs 8 samples, but there are 2"],
                                     ["eval.sets.0.pass_at=[8]"]),
    "unknown Megatron option": Case(["megatron.moe_router_dtyp: TransformerConfig has no such field; did you mean "
                                     "megatron.moe_router_dtype?"], ["megatron.moe_router_dtyp=fp64"]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the good config and its files, free to spoil."""
    write_good(tmp_path)
    return tmp_path


def assert_says(told: str, says: list[str | tuple[str, ...]], folder: Path) -> None:
    """One error, with these parts in this order."""
    at = 0
    for part in says:
        if isinstance(part, tuple):
            part = next((one for one in part if one in told[at:]), part[0])
        part = part.replace("F/", f"{folder}/")
        assert part in told[at:], f"{part!r} is not in {told!r} (after {at})"
        at = told.index(part, at) + len(part)
    assert told.startswith("error: ") and told.count("error: ") == 1 and "Traceback" not in told
    assert len(told.splitlines()) <= 2 and "mistakes:" not in told


@pytest.mark.parametrize("name", CHECKED)
def test_the_check_tells(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch,
                         capsys: pytest.CaptureFixture[str]) -> None:
    case = CHECKED[name]
    case.spoil(folder)
    for variable, value in case.environ.items():
        monkeypatch.setenv(variable, value)
    assert run_main(config_main, ["check", str(folder / "config.yaml"), *case.overrides]) == 64
    captured = capsys.readouterr()
    assert captured.out == ""
    assert_says(captured.err, case.says, folder)


LAUNCHED = {  # what only the real start finds; nobody else is started either
    "unknown key": CHECKED["unknown key"],
    "several nodes without an address": Case(["MASTER_ADDR: must be set for 3 nodes"], environ={"NNODES": "3"}),
    "nodes do not divide": Case(["NNODES: 2 nodes do not divide the 3 ranks"],
                                environ={"NNODES": "2", "MASTER_ADDR": "127.0.0.1"}),
    "no number": Case(["NNODES: 'two' is not a whole number of at least 1"], environ={"NNODES": "two"}),
}
TRAINED = {  # what only a rank finds: ranks are started, one tells, all end
    "prompt too long": Case(["rank ", "F/train.jsonl line ", ": the prompt has 5 tokens, above data.max_prompt_tokens "
                             "(3)"], ["data.max_prompt_tokens=3", "data.on_long_prompt=error"]),
    # a trainer and the engine both find it, and whoever is first tells
    "tensor unknown": Case(["rank ", "F/model", (f"tensor {'x' * 17} has no place in a qwen3_moe model",
                                                 "1 tensors are missing, among them model.norm.weight")],
                           spoil=rename("*.safetensors*", "model.norm.weight")),
}


def launch(folder: Path, case: Case) -> subprocess.CompletedProcess[str]:
    """Run the launch script on the folder's config; also asserts that no process is left behind."""
    mark = str(uuid.uuid4())
    environ = {**os.environ, "MEGARL_VENV": sys.prefix, "OMP_NUM_THREADS": "1", "MEGARL_TEST_MARK": mark}
    done = subprocess.run(["bash", str(ROOT / "launch" / "torchrun.sh"), str(folder / "config.yaml"), *case.overrides],
                          env=environ | case.environ, capture_output=True, text=True, timeout=120)
    assert marked(mark) == []
    return done


def marked(mark: str) -> list[str]:
    """Processes whose environment has the mark."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"MEGARL_TEST_MARK={mark}".encode() in entry.read_bytes().split(b"\0"):
                found.append((entry.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it ended meanwhile
    return found


@pytest.mark.parametrize("name", [*LAUNCHED, *TRAINED])
def test_the_launch_script_tells(name: str, folder: Path) -> None:
    case = LAUNCHED.get(name) or TRAINED[name]
    case.spoil(folder)
    done = launch(folder, case)
    assert done.returncode == 64, done.stderr
    if name in LAUNCHED:
        assert done.stdout == "" and not (folder / "run").exists()
    assert_says(done.stderr, case.says, folder)


def test_a_port_in_use_is_told(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = launch(folder, Case([], environ={"MASTER_PORT": str(port)}))
    assert done.returncode == 64
    assert_says(done.stderr, [f"MASTER_PORT: port {port} is in use on this node"], folder)
