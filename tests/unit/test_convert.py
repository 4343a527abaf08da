"""Conversions between Hugging Face's and Megatron-core's checkpoints, without Megatron-core: bytes, files, mistakes."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import models
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoint import convert, inspect
from megarl.checkpoint.convert import to_hf, to_megatron
from megarl.checkpoint.megatron_dir import MegatronDir, common_state
from megarl.checkpoint.safetensors_dir import INDEX
from megarl.checkpoint.streams import SafetensorsFile, Slot, plan_files
from megarl.checkpoint.team import Team, shared_out
from megarl.errors import MachineFault, UserMistake, run_main
from megarl.model.hf_config import HFConfig

ROOT = Path(__file__).parents[2]
ALONE = Team()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face directory."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Names, dtypes and bits; NaNs and negative zeros too."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and a[name].shape == b[name].shape and torch.equal(
            *(one[name].reshape(-1).view(torch.uint8) for one in (a, b))) for name in a)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf: a Qwen3-MoE in bf16, several shards, a tokenizer beside it; mg: converted."""
    path = tmp_path_factory.mktemp("convert")
    models.save_hf_model("qwen3_moe", path / "hf", dtype=torch.bfloat16, max_shard_size="40KB")
    for name in ("tokenizer.json", "chat_template.jinja", "special_tokens_map.json"):
        (path / "hf" / name).write_text(f"{{}} {name}")
    to_megatron(path / "hf", path / "mg", ALONE)
    return path


@pytest.mark.parametrize("name", models.FAMILIES)
def test_there_and_back_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    """In mixed dtypes (a router's bias stays fp32), with values that comparisons take for equal, or for different."""
    models.save_hf_model(name, tmp_path / "hf", dtype=torch.bfloat16)
    whole = tensors(tmp_path / "hf")
    for key in whole:
        if key.endswith("e_score_correction_bias"):
            whole[key] = torch.randn(whole[key].shape)
    whole["model.norm.weight"][:2] = torch.tensor([-0.0, float("nan")])
    if name in ("glm4_moe", "deepseek_v3"):  # layers for multi-token prediction
        whole |= {"model.layers.4.eh_proj.weight": torch.randn(32, 64), "model.layers.4.enorm.weight": torch.randn(32)}
    save_file(whole, tmp_path / "hf/model.safetensors")
    done = to_megatron(tmp_path / "hf", tmp_path / "mg", ALONE)
    assert done.tensors + done.beside == len(whole) and done.beside == 2 * (name in ("glm4_moe", "deepseek_v3"))
    to_hf(tmp_path / "mg", tmp_path / "back", ALONE, shard_bytes=30_000)
    assert same(tensors(tmp_path / "back"), whole)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_names_of_transformer_engine_are_read_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with its layers saves fused norms and grouped experts under other names."""
    models.save_hf_model(name, tmp_path / "hf")
    local = convert.tables.table
    with monkeypatch.context() as patch:
        patch.setattr(convert.tables, "table", lambda hf: local(hf, "transformer_engine"))
        to_megatron(tmp_path / "hf", tmp_path / "mg", ALONE)
    checkpoint = MegatronDir(tmp_path / "mg", HFConfig.read(tmp_path / "hf"))
    assert checkpoint.implementation == "transformer_engine"
    names = {f"{layer}{'linear_kv_up_proj' if name == 'deepseek_v3' else 'linear_qkv'}.layer_norm_weight"
             for layer in ("decoder.layers.self_attention.", "decoder.layers.0.self_attention.")}
    assert names & checkpoint.tensors.keys() and not any("{" in key for key in checkpoint.tensors)
    to_hf(tmp_path / "mg", tmp_path / "back", ALONE)
    assert same(tensors(tmp_path / "back"), tensors(tmp_path / "hf"))


def test_transformers_reads_what_comes_out(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    to_hf(folder / "mg", tmp_path / "back", ALONE, shard_bytes=30_000)
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in (tmp_path / "back").glob("*.safetensors")}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors(tmp_path / "back").values())
    ours, theirs = (AutoModelForCausalLM.from_pretrained(path, dtype="auto").state_dict()
                    for path in (tmp_path / "back", folder / "hf"))
    assert same(ours, theirs)


def test_other_files_come_along(folder: Path, tmp_path: Path) -> None:
    to_hf(folder / "mg", tmp_path / "back", ALONE)
    for place in (folder / "mg", tmp_path / "back"):
        for name in ("tokenizer.json", "chat_template.jinja", "special_tokens_map.json", "config.json"):
            assert (place / name).read_bytes() == (folder / "hf" / name).read_bytes()
    assert {path.suffix for path in (tmp_path / "back").iterdir()} == {".json", ".jinja", ".safetensors"}
    assert not {"metadata.json", "checksums.json"} & {path.name for path in (tmp_path / "back").iterdir()}


def test_dtype(tmp_path: Path) -> None:
    """Weights are rounded once, the router's bias is not, and the config says so."""
    models.save_hf_model("glm4_moe", tmp_path / "hf")
    whole = tensors(tmp_path / "hf") | {"model.layers.4.eh_proj.weight": torch.randn(32, 64),
                                        "model.layers.4.mlp.gate.e_score_correction_bias": torch.randn(8)}
    save_file(whole, tmp_path / "hf/model.safetensors")
    wanted = {name: tensor if name.endswith("correction_bias") else tensor.to(torch.bfloat16)
              for name, tensor in whole.items()}
    to_megatron(tmp_path / "hf", tmp_path / "mg16", ALONE, torch.bfloat16)
    to_hf(tmp_path / "mg16", tmp_path / "a", ALONE)
    to_megatron(tmp_path / "hf", tmp_path / "mg32", ALONE)
    to_hf(tmp_path / "mg32", tmp_path / "b", ALONE, dtype=torch.bfloat16)
    for name in "ab":
        assert same(tensors(tmp_path / name), wanted)
        assert HFConfig.read(tmp_path / name).dtype == "bfloat16"
    assert HFConfig.read(tmp_path / "mg32").dtype == "float32"


def test_dtypes_that_would_become_one_tensor(tmp_path: Path) -> None:
    models.save_hf_model("llama", tmp_path / "hf")
    whole = tensors(tmp_path / "hf")
    whole["model.layers.2.self_attn.k_proj.weight"] = whole["model.layers.2.self_attn.k_proj.weight"].half()
    save_file(whole, tmp_path / "hf/model.safetensors")
    with pytest.raises(UserMistake, match="k_proj.weight is torch.float16, .*q_proj.weight is torch.float32"):
        to_megatron(tmp_path / "hf", tmp_path / "mg", ALONE)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_slice_is_that_of_the_whole(folder: Path) -> None:
    """Of fused heads too: what a tensor-parallel rank reads."""
    hf, whole = HFConfig.read(folder / "hf"), tensors(folder / "hf")
    checkpoint = MegatronDir(folder / "mg", hf)
    for name, dim, start, stop in [
            ("model.layers.1.self_attn.q_proj.weight", 0, 32, 64),
            ("model.layers.1.self_attn.v_proj.weight", 0, 16, 32),
            ("model.layers.1.self_attn.k_proj.weight", 0, 16, 16),
            ("model.layers.3.self_attn.o_proj.weight", 1, 32, 64),
            ("model.layers.2.mlp.experts.5.up_proj.weight", 0, 12, 24), ("lm_head.weight", 0, 56, 99),
            ("model.layers.2.mlp.experts.7.down_proj.weight", 1, 0, 12)]:
        found = checkpoint.read(name, tuple(whole[name].shape), dim, start, stop)
        assert torch.equal(found, whole[name].narrow(dim, start, stop - start)), name


def test_a_file_as_safetensors_reads_it(tmp_path: Path) -> None:
    """Mixed sizes of elements, added in another order than they lie in; each aligned to its elements."""
    wanted = {"a": torch.randn(3).bfloat16(), "b": torch.randn(2, 5), "c": torch.tensor(2.5), "d": torch.randn(0, 4),
              "e": torch.randn(7, 1).double()}
    slots = [Slot(name, tuple(tensor.shape), tensor.dtype) for name, tensor in wanted.items()]
    with SafetensorsFile(tmp_path / "x.safetensors", slots) as out:
        assert not (tmp_path / "x.safetensors").exists()
        for name in "ecadb":
            out.add(name, wanted[name])
    assert same(load_file(tmp_path / "x.safetensors"), wanted)
    header = json.loads((tmp_path / "x.safetensors").read_bytes()[8:].split(b"}}", 1)[0] + b"}}")
    assert all(header[slot.name]["data_offsets"][0] % slot.dtype.itemsize == 0 for slot in slots)
    with pytest.raises(AssertionError, match="b was not written"):
        with SafetensorsFile(tmp_path / "y.safetensors", slots[1:2]):
            pass


def test_files_hold_what_fits() -> None:
    slots = [Slot(str(n), (size,), torch.float16) for n, size in enumerate((10, 10, 30, 5, 5))]
    (first, second), = [plan_files([slots[:3], slots[3:]], 40)]
    assert [[slot.name for slot in file] for _, file in first + second] == [["0", "1"], ["2"], ["3", "4"]]
    assert [name for name, _ in first + second] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert plan_files([slots[:1], []], 40)[0][0][0] == "model.safetensors"


def test_jobs_are_shared_out() -> None:
    sizes = [5, 1, 9, 2, 2, 7]
    shares = [shared_out(sizes, Team(rank, 3)) for rank in range(3)]
    assert sorted(sum(shares, [])) == list(range(6))
    assert [sum(sizes[n] for n in share) for share in shares] == [9, 9, 8]


def refused(work: object, *named: str) -> None:
    """One mistake that names these; nothing else is raised."""
    with pytest.raises(UserMistake) as error:
        work()
    for one in named:
        assert re.search(one, str(error.value)), str(error.value)


def test_bad_sources_leave_nothing(folder: Path, tmp_path: Path) -> None:
    """Each is told before anything is written."""
    shutil.copytree(folder / "hf", tmp_path / "hf")
    config, shard = tmp_path / "hf/config.json", sorted((tmp_path / "hf").glob("*.safetensors"))[3]
    raw, content = json.loads(config.read_text()), shard.read_bytes()

    def convert() -> None:
        to_megatron(tmp_path / "hf", tmp_path / "out", ALONE)

    shard.write_bytes(content[:-100])
    refused(convert, shard.name, "damaged")
    shard.unlink()
    refused(convert, shard.name, "missing")
    shard.write_bytes(content)
    for change, named in [({"model_type": "mamba"}, "known families: deepseek_v3, "),
                          ({"model_type": "llama"}, "has no place in a llama model"),
                          ({"vocab_size": 100}, r"\(99, 32\), config.json says \(100, 32\)"),
                          ({"num_hidden_layers": 3}, "layers.3.*has no place"),
                          ({"num_hidden_layers": 5}, "layers.4.* is missing")]:
        config.write_text(json.dumps(raw | change))
        refused(convert, named)
    refused(lambda: to_megatron(tmp_path / "nothing", tmp_path / "out", ALONE), "no such file")
    config.write_text(json.dumps(raw))
    for index in (b"[1]", b'{"weight_map": [1]}', b"\xff{}"):
        (tmp_path / "hf" / INDEX).write_bytes(index)
        refused(convert, "not a safetensors index")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_tied_embeddings_stated_wrongly(tmp_path: Path) -> None:
    """transformers does not tie what differs; a copy of the embeddings is one."""
    models.save_hf_model("qwen2", tmp_path / "hf")
    config, whole = tmp_path / "hf/config.json", tensors(tmp_path / "hf")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    refused(lambda: to_megatron(tmp_path / "hf", tmp_path / "out", ALONE), "lm_head.weight is not model.embed_tokens")
    whole["lm_head.weight"] = whole["model.embed_tokens.weight"].clone()
    save_file(whole, tmp_path / "hf/model.safetensors")
    assert to_megatron(tmp_path / "hf", tmp_path / "out", ALONE).tensors == len(whole) - 1


def test_bad_checkpoints_leave_nothing(folder: Path, tmp_path: Path) -> None:
    def convert(**options: object) -> None:
        to_hf(tmp_path / "mg", tmp_path / "out", ALONE, **options)

    refused(convert, "no metadata.json is there")
    shutil.copytree(folder / "mg", tmp_path / "mg")
    data, index, common = (tmp_path / "mg" / name for name in ("__0_0.distcp", ".metadata", "common.pt"))
    for file, named in [(data, "__0_0.distcp has .* bytes of"), (index, r"\.metadata"), (common, r"common\.pt")]:
        content = file.read_bytes()
        file.write_bytes(content[:len(content) // 2])
        refused(convert, "damaged", named)
        file.unlink()
        refused(convert, "damaged", named.split(" has")[0])
        file.write_bytes(content)
    torch.save({"iteration": 5}, common)  # of another program
    refused(convert, "does not say which model it is of")
    shutil.copyfile(folder / "mg/common.pt", common)
    models.save_hf_model("qwen3_moe", tmp_path / "other", vocab_size=120)
    refused(lambda: convert(like=tmp_path / "other"), "its model has vocab 99, .*other says 120")
    models.save_hf_model("llama", tmp_path / "llama")
    refused(lambda: convert(like=tmp_path / "llama"), "its model has family qwen3_moe, .*llama says llama")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "mg", "other"]


def test_a_flipped_bit_is_told(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the checksums of the files; without them, what the format itself finds is: a tensor without a beginning."""
    shutil.copytree(folder / "mg", tmp_path / "mg")
    whole = (tmp_path / "mg/__0_0.distcp").read_bytes()
    data = bytearray(whole)
    data[len(data) // 2] ^= 1
    (tmp_path / "mg/__0_0.distcp").write_bytes(bytes(data))
    refused(lambda: to_hf(tmp_path / "mg", tmp_path / "out", ALONE), "damaged: __0_0.distcp is not as it was written")
    assert run("inspect_checkpoint", tmp_path / "mg", "--check") == 64
    (tmp_path / "mg/checksums.json").unlink()
    data[len(data) // 2: len(data) // 2 + 6000] = b"x" * 6000
    (tmp_path / "mg/__0_0.distcp").write_bytes(bytes(data))
    refused(lambda: to_hf(tmp_path / "mg", tmp_path / "out", ALONE), "damaged: decoder")
    assert [path.name for path in tmp_path.iterdir()] == ["mg"]
    common, draw = (folder / "mg/common.pt").read_bytes(), random.Random(3)
    for _ in range(300):
        data = bytearray(common)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (tmp_path / "mg/common.pt").write_bytes(bytes(data))
        with suppress(UserMistake):  # what is no mistake is the same, or another value
            common_state(tmp_path / "mg")
    shutil.copyfile(folder / "mg/checksums.json", tmp_path / "mg/checksums.json")
    index, draw = (folder / "mg/.metadata").read_bytes(), random.Random(0)
    for _ in range(100):  # a pickle, of which anything may come out
        data = bytearray(index)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (tmp_path / "mg/.metadata").write_bytes(bytes(data))
        refused(lambda: inspect.summarise(tmp_path / "mg"), "damaged: .metadata is not as it was written")
    capsys.readouterr()
    for path, told in ((folder / "mg", "all 9 files are as they were written"), (folder / "hf", "no checksums")):
        assert run("inspect_checkpoint", path, "--check") == 0 and told in capsys.readouterr().out


def test_bad_targets_are_left_as_they_are(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for target in ("full", "file"):
        refused(lambda target=target: to_megatron(folder / "hf", tmp_path / target, ALONE), "is there already")
        refused(lambda target=target: to_hf(folder / "mg", tmp_path / target, ALONE), "is there already")
    refused(lambda: to_hf(folder / "mg", tmp_path / "file/below", ALONE), "cannot be made")
    refused(lambda: to_megatron(folder / "hf", Path("/proc/nothing/here"), ALONE), "cannot be made")  # even for root
    assert (tmp_path / "full/mine").read_text() == (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    to_hf(folder / "mg", tmp_path / "link", ALONE)
    assert same(tensors(tmp_path / "empty"), tensors(folder / "hf")) and (tmp_path / "link").is_symlink()


def test_a_mount_point_is_refused_at_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory cannot take its name."""
    (tmp_path / "mount").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "mount")
    refused(lambda: to_hf(folder / "mg", tmp_path / "mount", ALONE), "a file system is mounted there")
    to_hf(folder / "mg", tmp_path / "mount/out", ALONE)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    refused(lambda: to_hf(folder / "mg", tmp_path / "closed/out", ALONE), "cannot be made: Permission denied")


LIMITED = """
import resource, signal, sys
from pathlib import Path
from megarl.checkpoint.convert import to_hf, to_megatron
from megarl.checkpoint.team import Team
from megarl.errors import run_main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # a write beyond fails as on a full disk
work = {"in": to_megatron, "out": to_hf}[sys.argv[1]]
sys.exit(run_main(lambda argv: work(Path(argv[0]), Path(argv[1]), Team()), sys.argv[2:]))
"""


@pytest.mark.parametrize("way, source", [("in", "hf"), ("out", "mg")])
def test_a_full_disk_is_a_fault_and_leaves_nothing(way: str, source: str, folder: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, way, str(folder / source), str(tmp_path / "out")],
                          capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == MachineFault.status, done.stderr
    assert len(done.stderr.splitlines()) == 1 and "could not be written: File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


MEMORY = """
import sys
from pathlib import Path
from megarl.checkpoint.convert import to_hf, to_megatron
from megarl.checkpoint.team import Team
def status(): return {k: int(v.split()[0]) << 10 for k, v in (line.split(":") for line in open("/proc/self/status")) if k in ("VmHWM", "VmRSS")}
before = status()
{"in": to_megatron, "out": to_hf}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]), Team())
assert not any(name.split(".")[0] in ("megatron", "transformers") for name in sys.modules)
print(status()["VmHWM"] - before["VmRSS"])
"""  # noqa: E501


def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    """A model of 220 MB whose largest tensor has 16 MB, in files of 60 MB; tests/bench/convert_memory.py says more."""
    models.save_hf_model("qwen3", tmp_path / "hf", dtype=torch.bfloat16, max_shard_size="60MB", vocab_size=16384,
                         hidden_size=512, num_hidden_layers=16, intermediate_size=8192)
    largest = 16384 * 512 * 2
    size = sum(file.stat().st_size for file in (tmp_path / "hf").glob("*.safetensors"))
    assert size > 200e6
    for way, source, target in (("in", "hf", "mg"), ("out", "mg", "back")):
        done = subprocess.run([sys.executable, "-c", MEMORY, way, str(tmp_path / source), str(tmp_path / target)],
                              capture_output=True, text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < 3 * largest + 24e6, f"{way}: {int(done.stdout) / largest:.2f} times the largest"
    assert same(tensors(tmp_path / "back"), tensors(tmp_path / "hf"))


def test_two_conversions_into_one_directory(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is told, and the first comes out whole."""
    add, more = convert.streams.BoxFile.add, []

    def meanwhile(*arguments: object) -> None:
        if not more:
            more.append("tried")
            refused(lambda: to_megatron(folder / "hf", tmp_path / "out", ALONE), "another conversion is making it")
        add(*arguments)

    monkeypatch.setattr(convert.streams.BoxFile, "add", meanwhile)
    to_megatron(folder / "hf", tmp_path / "out", ALONE)
    assert more and convert.refuse_damaged(tmp_path / "out", ALONE)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_killed_conversion_is_swept_away(folder: Path, tmp_path: Path) -> None:
    """By the next one; nothing ever stood under the target's name."""
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/model.safetensors").write_text("half")
    to_hf(folder / "mg", tmp_path / "out", ALONE)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert same(tensors(tmp_path / "out"), tensors(folder / "hf"))


def run(tool: str, *arguments: object) -> int:
    """The status that a tool ends with."""
    spec = importlib.util.spec_from_file_location(tool, ROOT / "tools" / f"{tool}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return run_main(module.main, [str(argument) for argument in arguments])


def test_the_tools(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, back = tmp_path / "mg", tmp_path / "hf"
    assert run("convert_hf_to_megatron", "--hf", folder / "hf", "--out", out) == 0
    assert "135 tensors, 0.000 GB" in capsys.readouterr().out
    assert run("convert_hf_to_megatron", "--hf", folder / "hf", "--out", out) == 64
    assert capsys.readouterr().err.startswith(f"error: {out}: it is there already")
    assert run("convert_megatron_to_hf", "--checkpoint", out, "--out", back, "--shard-gb", 0.0001) == 0
    assert same(tensors(back), tensors(folder / "hf"))
    assert run("convert_megatron_to_hf", "--checkpoint", tmp_path / "none", "--out", tmp_path / "x") == 64
    capsys.readouterr()
    assert run("inspect_checkpoint", out, "--tensors", "router") == 0
    told = capsys.readouterr().out
    assert "qwen3_moe, 4 layers" in told and "4 x 8 x 32" in told
    sums = []
    for path in (out, folder / "hf"):
        assert run("inspect_checkpoint", path, "--checksums") == 0
        sums.append(capsys.readouterr().out)
    assert sums[0] == sums[1] and len(sums[0].splitlines()) == 135


def test_several_processes(folder: Path, tmp_path: Path) -> None:
    """As torchrun starts them. A mistake is told once."""
    def convert() -> list[subprocess.CompletedProcess[str]]:
        command = [sys.executable, str(ROOT / "tools/convert_hf_to_megatron.py"), "--hf", str(folder / "hf"), "--out",
                   str(tmp_path / "mg")]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        env = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                            "MASTER_PORT": str(port)}
        started = [subprocess.Popen(command, env=env | {"RANK": str(rank)}, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                                    stderr=subprocess.PIPE) for rank in range(2)]
        return [subprocess.CompletedProcess(command, process.wait(), *process.communicate()) for process in started]

    done = convert()
    assert [one.returncode for one in done] == [0, 0], done
    assert [bool(one.stdout) for one in done] == [True, False]
    assert len(list((tmp_path / "mg").glob("*.distcp"))) == 2
    to_hf(tmp_path / "mg", tmp_path / "back", ALONE)
    assert same(tensors(tmp_path / "back"), tensors(folder / "hf"))
    done = convert()
    assert [one.returncode for one in done] == [64, 64]
    assert "".join(one.stderr for one in done).count("is there already") == 1


def test_the_layout_of_a_run_is_told(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "mg", tmp_path / "mg")
    common = torch.load(tmp_path / "mg/common.pt")
    torch.save(common | {"progress": {"step": 7, "position": 70}, "updates": 14, "world": 8, "settings": {
        "parallel": {"tensor": 2, "pipeline": 2, "context": 1, "expert": 2, "expert_tensor": 1},
        "pipeline": {"schedule": "zb-v"}}}, tmp_path / "mg/common.pt")
    facts = inspect.summarise(tmp_path / "mg").facts
    assert facts["layout"] == "tensor 2 pipeline 2 expert 2, zb-v" and facts["ranks"] == "8" and facts["step"] == "7"
    (tmp_path / "runs/mine/checkpoints").mkdir(parents=True)
    for name in ("step_00000009", "step_00000010", "step_best", ".partial_00000011"):
        (tmp_path / "runs/mine/checkpoints" / name).mkdir()
    for path in (tmp_path / "runs/mine", tmp_path / "runs/mine/checkpoints"):
        assert inspect.newest(path).name == "step_00000010"


def test_summaries(folder: Path) -> None:
    summary = inspect.summarise(folder / "mg")
    uses, rows = inspect.sizes(summary)
    whole = tensors(folder / "hf")
    padding = 2 * 5 * 32 * 2  # of the vocabulary of both embeddings
    assert uses == ["weights"] and sum(row["weights"] for row in rows.values()) == padding + sum(
        tensor.nbytes for tensor in whole.values())
    assert list(rows) == ["embedding", "attention", "router", "experts", "norms", "head"]
    of_hf = inspect.sizes(inspect.summarise(folder / "hf"))[1]
    assert {part: row["weights"] for part, row in of_hf.items() if part not in ("embedding", "head")} == {
        part: row["weights"] for part, row in rows.items() if part not in ("embedding", "head")}
