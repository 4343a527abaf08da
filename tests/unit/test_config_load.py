"""YAML and overrides into the tree; mistakes with their line."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import keys
from megarl.config.load import build, load, save_effective
from megarl.config.reference import markdown
from megarl.config.schema import Config
from megarl.errors import UserMistake, UserMistakes

MINIMAL = """\
model: {path: m}
data:
  sources:
    - path: a.jsonl
    - {path: b.jsonl, weight: 2}
reward: {terms: [{name: exact}]}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text(text)
    return path


def mistakes(folder: Path, text: str, *overrides: str) -> list[str]:
    """The lines told about a config, without the folder's name."""
    with pytest.raises(UserMistake) as caught:
        load(write(folder, text), overrides)
    told = caught.value.mistakes if isinstance(caught.value, UserMistakes) else [caught.value]
    return [mistake.line().replace(f"{folder}/", "") for mistake in told]


def test_values_and_defaults(tmp_path: Path) -> None:
    config = load(write(tmp_path, MINIMAL + "optim:\n  lr: 1e-6\n  betas: [0.9, 0.99]\nobjective:\n"))
    assert config.optim.lr == 1e-6 and config.optim.betas == (0.9, 0.99)
    assert config.data.sources[1].weight == 2.0
    assert config.objective.algorithm == "gspo"  # a section left empty has its defaults


def test_yaml_scalars_are_not_surprising(tmp_path: Path) -> None:
    text = MINIMAL + "sglang: {a: 010, b: 1_000, c: yes, d: 2026-01-01, e: 1:30, f: .5, g: -3, h: ~, i: true, j: 1e3}\n"
    assert load(write(tmp_path, text)).sglang == {
        "a": 10, "b": 1000, "c": "yes", "d": "2026-01-01", "e": "1:30", "f": 0.5, "g": -3, "h": None, "i": True,
        "j": 1000.0}


def test_overrides(tmp_path: Path) -> None:
    config = load(write(tmp_path, MINIMAL), [
        "optim.lr=3e-5", "data.sources.1.weight=4.5", "batch={minibatches: 2}", "batch={epochs: 3}", "run.dir=/x=y",
        "rollout.stop=['###', '</s>']", "megatron.moe_router_dtype=fp64", "optim.lr=4e-5"])
    assert config.optim.lr == 4e-5  # the later one
    assert config.data.sources[1].weight == 4.5 and config.data.sources[1].path == "b.jsonl"
    assert config.batch.minibatches == 2 and config.batch.epochs == 3  # mappings merge
    assert config.run.dir == "/x=y" and config.rollout.stop == ["###", "</s>"]
    assert config.megatron == {"moe_router_dtype": "fp64"}


@pytest.mark.parametrize(("override", "told"), [
    ("optim", "override 'optim': is not key.path=value; for example optim.lr=1e-6"),
    ("data.sources.2.path=x", "override 'data.sources.2.path=x': data.sources is a list of 2 and has no entry 2; "
                              "use a number from 0 to 1"),
    ("model.path.x=1", "override 'model.path.x=1': model.path is 'm' and has no keys of its own"),
    ("optim.lr=[1", "override 'optim.lr=[1': not YAML: expected ',' or ']', but got '<stream end>'"),
    ("optim.lr=fast", "override: optim.lr: 'fast' is not a number above 0"),
    ("optim.lrr=1", "override: optim.lrr: unknown key; did you mean optim.lr?"),
    ("optim.lr=.inf", "override: optim.lr: inf is not a number above 0"),
])
def test_bad_overrides(tmp_path: Path, override: str, told: str) -> None:
    assert mistakes(tmp_path, MINIMAL, override) == [told]


def test_all_mistakes_are_told_with_their_lines(tmp_path: Path) -> None:
    text = MINIMAL + """\
run: {steps: ten, seed: 1.5}
parallel:
  sequence: maybe
  tensr: 2
objective:
  algorithm: grop
rollout:
  stop_token_ids: [1, a]
lr: 3
"""
    assert sorted(mistakes(tmp_path, text, "observe.jsonl=1")) == sorted([
        "c.yaml:7: run.steps: 'ten' is not a whole number above 0",
        "c.yaml:7: run.seed: 1.5 is not a whole number of at least 0",
        "c.yaml:9: parallel.sequence: 'maybe' is not true or false or auto",
        "c.yaml:10: parallel.tensr: unknown key; did you mean parallel.tensor?",
        "c.yaml:12: objective.algorithm: 'grop' is not one of grpo, gspo, gspo_token, dapo, dr_grpo; "
        "did you mean grpo?",
        "c.yaml:14: rollout.stop_token_ids.1: 'a' is not right here; give a list, each entry a whole number",
        "c.yaml:15: lr: unknown key; did you mean optim.lr?",
        "override: observe.jsonl: 1 is not true or false"])


@pytest.mark.parametrize(("text", "told"), [
    ("a: 1\nb: [\n", "c.yaml:3: not YAML: expected the node content, but found '<stream end>'"),
    ("run: {}\nmodel:\n  path: a\n  path: b\n", "c.yaml:4: path stands here and in line 3; keep one of them"),
    ("- 1\n", "c.yaml: must hold keys and values, not a list or a word; start with the sections "
              + ", ".join(Config.model_fields)),
])
def test_not_a_config(tmp_path: Path, text: str, told: str) -> None:
    assert mistakes(tmp_path, text) == [told]


def test_empty_file_names_what_is_missing(tmp_path: Path) -> None:
    told = mistakes(tmp_path, "# nothing\n")
    assert [line.split(":")[1].strip() for line in told] == ["model", "data"]
    assert "is missing (the policy); give a section with the keys path, weights, implementation" in told[0]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserMistake, match="nowhere.yaml: cannot be read: No such file"):
        load(tmp_path / "nowhere.yaml")


def test_effective_config_reads_back_equal(tmp_path: Path) -> None:
    config = load(write(tmp_path, MINIMAL), ["optim.lr=1e-7", "optim.eps=1e-15", "objective.clip_low=3e-4",
                                             "rollout.stop=['a: b', '1e5', 'null']", "reward.error_value=-0.5"])
    save_effective(config, tmp_path / "effective.yaml")
    assert load(tmp_path / "effective.yaml") == config


def test_config_is_frozen() -> None:
    config = build({"model": {"path": "m"}, "data": {"sources": [{"path": "a"}]}, "reward": {"terms": [{"name": "x"}]}})
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 3


def test_every_key_is_described_and_the_reference_is_current() -> None:
    assert [key.path for key in keys.walk() if not key.description] == []
    document = Path(__file__).parents[2] / "docs" / "config.md"
    assert document.read_text() == markdown(), "run: python -m megarl.config reference > docs/config.md"
