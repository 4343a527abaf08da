"""Rules across keys, each broken once in a config that is otherwise right."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from good_config import MODEL, good_tree, write_files, write_good, write_tree

from megarl.config.check import check, load_checked
from megarl.config.load import build
from megarl.config.options import class_fields
from megarl.errors import UserMistake


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the good config's files; tests only read it."""
    path = tmp_path_factory.mktemp("good")
    write_files(path)
    return path


def told(folder: Path, changes: dict[str, Any], environ: dict[str, str] | None = None) -> list[str]:
    """One line for each mistake in the good config with some keys ("batch.minibatches") changed."""
    tree = copy.deepcopy(good_tree(folder))
    for path, value in changes.items():
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        at: Any = tree
        for part in parents:
            at = at[part] if isinstance(at, list) else at.setdefault(part, {})
        at[last] = value
    return [mistake.line() for mistake in check(build(tree), environ=environ or {}).mistakes]


def test_the_good_config_is_good(folder: Path) -> None:
    report = check(build(good_tree(folder)), environ={"WORLD_SIZE": "3"})
    assert report.mistakes == [] and report.notes == []
    # 4 prompts x 4 samples x (16 + 8) tokens
    layout, objective, work = report.summary.split(" | ")
    assert layout == "TP1 PP1 CP1 EP2 ETP1 DP2 (2 ranks) + 1 rollout"
    assert objective.startswith("gspo, sequence ratio, clip 0.0003/0.0004")
    assert work == "4 prompts x 4 = 16 samples, at most 384 tokens and 2 updates a step, 2 steps"


@pytest.mark.parametrize(("changes", "expected"), [
    ({"parallel.tensor": 2, "cluster.trainers": 3},
     "parallel: tensor 2 x pipeline 1 x context 1 = 2 does not divide the 3 trainer ranks; make cluster.trainers a "
     "multiple of 2, or lower a degree"),
    ({"parallel.expert": 4},
     "parallel.expert: expert 4 x expert_tensor 1 does not divide the 2 ranks of a pipeline stage; use a divisor of 2"),
    ({"parallel.pipeline": 3, "cluster.trainers": 6, "pipeline.schedule": "1f1b"},
     "parallel.pipeline: 3 ranks with 1 stage each need 3 layers, the model has 2; use at most 2"),
    ({"parallel.pipeline": 2, "cluster.trainers": 4, "pipeline.schedule": "zb-v"},
     "parallel.pipeline: 2 ranks with 2 stages each need 4 layers, the model has 2; use at most 1"),
    ({"parallel.pipeline": 2, "cluster.trainers": 4, "parallel.layers_per_stage": [2, 1]},
     "parallel.layers_per_stage: [2, 1] are 2 stages with 3 layers; the layout has 2 stages, the model 2 layers; give "
     "2 numbers that add up to 2, or auto"),
    ({"parallel.pipeline": 3, "cluster.trainers": 6, "pipeline.schedule": "dualpipe"},
     "parallel.pipeline: dualpipe puts every stage on two ranks, 3 is odd; use an even number, or pipeline.schedule: "
     "dualpipev"),
    ({"parallel.tensor": 4, "cluster.trainers": 4},
     "parallel.tensor: 4 does not divide the model's 2 key/value heads; use one of [1, 2]"),
    ({"parallel.expert": 3, "cluster.trainers": 3},
     "parallel.expert: 3 does not divide the model's 4 experts; use one of [1, 2]"),
    ({"parallel.sequence": True},
     "parallel.sequence: sequence parallelism needs tensor parallelism; set parallel.tensor above 1 or leave "
     "parallel.sequence at auto"),
    ({"parallel.tensor": 2, "parallel.sequence": False},
     "parallel.sequence: a MoE model with tensor parallelism needs sequence parallelism; set it to true or auto"),
    ({"batch.minibatches": 3},
     "batch.minibatches: 3 does not divide the 4 groups of a step (data.prompts_per_step); use one of [1, 2, 4]"),
    ({"data.prompts_per_step": 1, "batch.minibatches": 1, "rollout.samples_per_prompt": 2, "cluster.trainers": 4,
      "parallel.expert": 4},
     "data.prompts_per_step: a minibatch has 2 samples for 4 data-parallel ranks: some would idle; raise it, or lower "
     "batch.minibatches"),
    ({"rollout.top_p": 0.9},
     "rollout.top_p: 0.9 truncates the distribution, but engines return log-probs from before the truncation: "
     "importance weights would be biased; leave it at 1.0; evaluation may truncate (eval.sets.0.sampling.top_p)"),
    ({"rollout.max_lag": 1, "rollout.ahead": 1.5},
     "rollout.ahead: what is sampled 1.5 steps ahead would be older than rollout.max_lag (1) allows when it is trained "
     "on; use at most rollout.max_lag, or raise that"),
    ({"rollout.on_update": "abort", "rollout.stop": ["x"]},
     "rollout.on_update: a stop string may lie across the place where an aborted answer is continued, and would not be "
     "seen; use retract, or stop at tokens (rollout.stop_token_ids)"),
    ({"sync.overlap": True},
     "sync.overlap: with rollout.max_lag 0 the next samples wait for the new weights: there is nothing to overlap "
     "with; set it to false, or rollout.max_lag to 1 or more"),
    ({"sync.directory": "/shared"},
     "sync.directory: broadcast writes no files; remove it, or set sync.transport: disk"),
    ({"rollout.samples_per_prompt": 1},
     "rollout.samples_per_prompt: 1 sample a group: an advantage is relative to the group's mean, so all would be 0; "
     "use 2 or more"),
    ({"objective.kl": {"coefficient": 0.1, "estimator": "k1"}},
     "objective.kl.estimator: the gradient of k1 in the loss is 0 in expectation; use k2 or k3, or set "
     "objective.kl.place: reward"),
    ({"objective.correction": {"low": 0.5}},
     "objective.correction.low: 0.5 would not be used: truncation cuts at high only; leave it at 0, or set "
     "objective.correction.kind: masked"),
    ({"objective.proximal": "behaviour"},
     "objective.correction.kind: truncated would weigh twice: the ratio to the engine's log-probs holds old / engine "
     "already; set none (reject may stay), or objective.proximal: old"),
    ({"debug.replay_experience": "F/model"},
     "cluster.rollouts: 1 ranks for engines, but replayed experiences (debug.replay_experience) need none; use 0"),
    ({"debug.replay_experience": "F/none", "cluster.rollouts": 0},
     "debug.replay_experience: F/none is not a directory; name the directory that debug.dump_experience had"),
    ({"debug.replay_experience": "F/model", "cluster.rollouts": 0, "debug.rollout_only": True},
     "debug.rollout_only: nothing is sampled where experiences are replayed; remove it, or debug.replay_experience"),
    ({"reward.on_error": "value"},
     "reward.error_value: on_error is value, but no value is given; give a number, or set reward.on_error: drop"),
    ({"reward.error_value": 0.0},
     "reward.error_value: 0.0 would not be used: on_error is drop; remove it, or set reward.on_error: value"),
    ({"eval.sets.0.pass_at": [4]},
     "eval.sets.0.pass_at: pass@4 needs 4 samples, but there are 2; raise eval.sets.0.sampling.samples or lower k"),
    ({"eval.sets.0.sampling.temperature": 0.0},
     "eval.sets.0.sampling.samples: 2 samples at temperature 0 are all the same; use 1, or a temperature above 0"),
    ({"eval.sets": []},
     "eval.sets: every 1 steps, but there is nothing to evaluate on; name a set, or set eval.every: 0"),
    ({"rollout.max_response_tokens": 60},
     "rollout.max_response_tokens: 60 after a prompt of up to 16 tokens (data.max_prompt_tokens) is more than the "
     "model's 64 positions; use at most 48"),
    ({"eval.sets.0.sampling.max_response_tokens": 49},
     "eval.sets.0.sampling.max_response_tokens: 49 after a prompt of up to 16 tokens is more than the model's 64 "
     "positions; use at most 48"),
    ({"batch.max_tokens": 20, "batch.on_long_sequence": "error"},
     "batch.max_tokens: a prompt and its response may take 24 padded tokens, more than batch.max_tokens (20); use at "
     "least 24, or batch.on_long_sequence: own"),
    ({"cluster.store": "node1"},
     "cluster.store: 'node1' is neither auto nor host:port; for example node1:29400"),
    ({"model.implementation": "transformer_engine"},
     "model.implementation: transformer_engine needs a GPU, but cluster.device is cpu; use local or auto"),
    ({"megatron.moe_router_dtyp": "fp64"},
     "megatron.moe_router_dtyp: TransformerConfig has no such field; did you mean megatron.moe_router_dtype?"),
    ({"megatron.hidden_size": 3},
     "megatron.hidden_size: cannot be set here; it comes from the model's config.json"),
    ({"megatron.moe_permute_fusion": "on"},
     "megatron.moe_permute_fusion: 'on' does not fit TransformerConfig.moe_permute_fusion; give a value of the type "
     "bool"),
    ({"megatron.moe_token_dispatcher_type": "flx"},
     "megatron.moe_token_dispatcher_type: 'flx' does not fit TransformerConfig.moe_token_dispatcher_type; give a value "
     "of the type Literal['allgather', 'alltoall', 'flex']"),
    ({"data.sources.0.path": "F.txt"}, "data.sources.0.path: F.txt is neither .jsonl nor .parquet; give one of these"),
    ({"model.weights": "F/model"},
     "model.weights: F/model has no metadata.json; give a directory that tools/convert_hf_to_megatron.py made, or a "
     "run's checkpoints/step_*"),
    ({"model.path": "F/none"},
     "model.path: F/none is not a directory; give the directory of a Hugging Face checkpoint"),
    ({"run.dir": "F/train.jsonl/run"}, "run.dir: F/train.jsonl is a file; give a directory"),
])
def test_rules(folder: Path, changes: dict[str, Any], expected: str) -> None:
    changes = {key: value.replace("F/", f"{folder}/") if isinstance(value, str) else value
               for key, value in changes.items()}
    assert told(folder, changes) == [expected.replace("F/", f"{folder}/")]


def test_world_size_is_compared_where_it_is_set(folder: Path) -> None:
    assert told(folder, {}, {"WORLD_SIZE": "4"}) == [
        "cluster.trainers: 2 trainers + 1 rollouts = 3 ranks, but WORLD_SIZE is 4; start 3 ranks, or change the "
        "partitions"]


def test_unknown_reward_names_the_nearest(folder: Path) -> None:
    [line] = told(folder, {"reward.terms": [{"name": "exct"}]})
    assert line.startswith("reward.terms.0.name: unknown reward function 'exct'; did you mean exact")


def test_mistakes_are_collected_and_placed(folder: Path) -> None:
    path = write_tree(folder, good_tree(folder))
    with pytest.raises(UserMistake) as caught:
        load_checked(path, ["batch.minibatches=3", "rollout.top_k=5"])
    lines = [mistake.line() for mistake in caught.value.mistakes]
    assert [line.split(";")[0].split(": ")[:2] for line in lines] == [["override", "rollout.top_k"],
                                                                      ["override", "batch.minibatches"]]
    with pytest.raises(UserMistake) as caught:
        load_checked(path, ["cluster.trainers=3", "parallel.expert=1", "data.prompts_per_step=3"])
    number = path.read_text().splitlines().index("  minibatches: 2") + 1
    assert str(caught.value).startswith(f"{path}:{number}: batch.minibatches: 2 does not divide the 3 groups")


def test_a_long_sequence_is_a_note_where_it_is_allowed(folder: Path) -> None:
    tree = good_tree(folder)
    tree["batch"]["max_tokens"] = 20
    report = check(build(tree), environ={})
    assert report.mistakes == []
    assert report.notes == ["a prompt and its response may take 24 padded tokens, more than batch.max_tokens (20): "
                            "such a sequence gets a micro-batch of its own"]


def test_padded_heads_are_a_note(tmp_path: Path) -> None:
    write_files(tmp_path)
    spoil_config_json(tmp_path, num_attention_heads=6, num_key_value_heads=3)
    tree = good_tree(tmp_path) | {"parallel": {"tensor": 2}}
    notes = check(build(tree), environ={}).notes
    assert notes == ["parallel.tensor 2 does not divide the model's 3 key/value heads: they are padded to 4"]
    assert "parallel.tensor: 4 does not divide the model's 3 key/value heads; use one of [1, 3]" in told(
        tmp_path, {"parallel.tensor": 4, "parallel.expert": 1, "cluster.trainers": 4})


def spoil_config_json(folder: Path, **changes: Any) -> None:
    (folder / "model" / "config.json").write_text(json.dumps({**MODEL, **changes}))


@pytest.mark.parametrize(("spoil", "expected"), [
    (lambda f: (f / "model/model-00002-of-00002.safetensors").unlink(),
     "model-00002-of-00002.safetensors is not there; download the checkpoint's missing files"),
    (lambda f: (f / "model/model-00001-of-00002.safetensors").write_bytes(
        (f / "model/model-00001-of-00002.safetensors").read_bytes()[:-1]), "is cut short or no safetensors file"),
    (lambda f: (f / "model/model-00001-of-00002.safetensors").write_bytes(b"\xff" * 100), "is cut short or no"),
    (lambda f: (f / "model/model.safetensors.index.json").write_text("{}"), "is not an index of safetensors shards"),
    (lambda f: (f / "model/tokenizer.json").unlink(), "has no tokenizer; it needs one of tokenizer.json"),
    (lambda f: (f / "model/config.json").unlink(), "config.json: there is no such file"),
    (lambda f: spoil_config_json(f, model_type="mamba"), "model family 'mamba' is not known; known families: "),
    (lambda f: (f / "train.jsonl").unlink(), "train.jsonl is not there"),
    (lambda f: (f / "train.jsonl").write_text(""), "train.jsonl has no rows"),
    (lambda f: (f / "train.jsonl").write_text("\n\n"), "train.jsonl has no rows"),
    (lambda f: (f / "heldout.jsonl").write_text('{"prompt": "a", "label": 1}\n\n{"prompt": \n'),
     "heldout.jsonl line 3: not JSON: Expecting value"),
    (lambda f: (f / "heldout.jsonl").write_text("[1]\n"), "heldout.jsonl line 1: not a JSON object"),
    (lambda f: (f / "heldout.jsonl").write_bytes(b'{"prompt": "\xff"}\n'), "line 1: not JSON: not UTF-8 text"),
    (lambda f: (f / "heldout.jsonl").write_text('{"prompt": "a"}\n'),
     "heldout.jsonl line 1: no column 'label'; its columns are prompt"),
])
def test_files(tmp_path: Path, spoil: Any, expected: str) -> None:
    write_good(tmp_path)
    spoil(tmp_path)
    [line] = told(tmp_path, {})
    assert expected in line


def test_weights_that_nothing_will_read_may_be_gone(tmp_path: Path) -> None:
    """A run with a checkpoint needs its first weights for a reference model, engines and the export only."""
    write_good(tmp_path)
    for path in (tmp_path / "model").glob("*.safetensors"):
        path.unlink()
    (tmp_path / "experience").mkdir()
    weights, kl = {"model.weights": str(tmp_path / "gone")}, {"objective.kl.coefficient": 0.1}
    alone = {"checkpoint.export": False, "cluster.rollouts": 0, "debug.replay_experience": str(tmp_path / "experience")}
    dummies = {"checkpoint.export": False, "rollout.engine": "sglang", "sglang.load_format": "dummy"}

    def missing(*changes: dict[str, Any]) -> list[str]:
        found = told(tmp_path, {key: value for part in changes for key, value in part.items()})
        return [line.partition(":")[0] for line in found if line.startswith("model.")]

    assert missing(alone) == missing(alone, kl) == missing(dummies) == ["model.path"]
    assert missing(alone, weights) == missing(dummies, weights) == ["model.weights"]
    (tmp_path / "run/checkpoints/step_00000003").mkdir(parents=True)
    assert missing(alone) == missing(dummies) == missing(alone, weights) == missing(dummies, weights) == []
    assert missing() == missing(weights) == missing({"checkpoint.export": False}) == ["model.path"]
    assert missing(alone, {"checkpoint.export": True}) == missing(alone, kl) == ["model.path"]
    assert missing(alone, kl, weights) == ["model.weights"]
    assert missing(alone, {"checkpoint.resume": False}) == ["model.path"]
    assert missing({"debug.rollout_only": True}, {"checkpoint.export": False}) == ["model.path"]
    (tmp_path / "run/checkpoints/step_00000003").rename(tmp_path / "run/checkpoints/.replaced_00000003")
    assert missing(alone) == []
    (tmp_path / "model/tokenizer.json").unlink()
    assert missing(alone) == ["model.path"]


def test_parquet(tmp_path: Path) -> None:
    write_good(tmp_path)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "label": ["b"]}), tmp_path / "t.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [], "label": []}), tmp_path / "empty.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    assert told(tmp_path, {"data.sources.0.path": str(tmp_path / "t.parquet")}) == []
    for name, column, expected in (("t", "q", "no column 'q'; its columns are prompt, label"),
                                   ("empty", "prompt", "has no rows"), ("bad", "prompt", "not Parquet")):
        [line] = told(tmp_path, {"data.sources.0": {"path": str(tmp_path / f"{name}.parquet"), "prompt": column}})
        assert expected in line


def test_class_fields_are_read_from_source(tmp_path: Path) -> None:
    source = tmp_path / "args.py"
    source.write_text("import torch\nclass Other:\n    x: int = 1\nclass Args(Other):\n    a: Optional[int] = None\n"
                      "    b: torch.dtype = torch.float32\n    def f(self): ...\n    c: str\n    d = 1\n")
    fields = class_fields(source, "Args")
    assert list(fields) == ["a", "b", "c"] and fields["a"] == int | None and fields["b"] is Any


def test_the_check_needs_no_torch(folder: Path) -> None:
    path = write_tree(folder, good_tree(folder))
    code = ("import sys\nfrom megarl.config.check import load_checked\n"
            f"load_checked({str(path)!r}, ['megatron.moe_router_dtype=fp64'])\n"
            "print([name for name in ('torch', 'megatron.core', 'transformers', 'sglang') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_step_that_does_not_come_is_noted(folder: Path) -> None:
    tree = good_tree(folder)
    tree["observe"] = {"trace_steps": [1, 5]}
    assert check(build(tree), environ={}).notes == ["observe.trace_steps: the run has no step 5"]


def test_prompts_that_the_run_takes_are_not_refused(tmp_path: Path) -> None:
    """One that fits among many; half of a character; a template in its own file; a tokenizer that is not read here."""
    write_files(tmp_path)
    train, model = tmp_path / "train.jsonl", tmp_path / "model"

    def found(rows: list[Any], limit: int = 3, **data: Any) -> list[str]:
        train.write_text("".join(json.dumps({"prompt": row, "label": "b"}) + "\n" for row in rows))
        tree = good_tree(tmp_path)
        tree["data"] |= {"max_prompt_tokens": limit, **data}
        return [mistake.line() for mistake in check(build(tree), environ={}).mistakes]

    long = "sort 1 2 3 4 5 6 ="
    assert found([long] * 2) == [f"{train}: all 2 prompts are longer than data.max_prompt_tokens (3); raise it"]
    assert found([long] * 2, on_long_prompt="error") == found([long, "sort 1 ="]) == []  # the latter without <bos>
    assert found([long, "\ud800" * 9]) == found([long] * 1001) == []
    messages = [[{"role": "user", "content": long}]]
    assert len(found(messages)) == 1
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert found(messages) == found(["sort 1"], chat_template="always") == []
    (model / "tokenizer.json").write_text("{}")
    assert found([long]) == []
