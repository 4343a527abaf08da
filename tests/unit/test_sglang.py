"""How SGLang is found, checked and started; no SGLang is needed here (tests/sglang runs the real one)."""

from __future__ import annotations

import copy
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from good_config import good_tree, write_files

from megarl.cluster.keys import Keys
from megarl.cluster.partition import Partition
from megarl.config.check import check
from megarl.config.engines import check as check_engines
from megarl.config.engines import gpus, host_of, nodes
from megarl.config.load import build
from megarl.config.schema import Config
from megarl.config.sglang import VERSION, check_nccl, environment, installation
from megarl.errors import UserMistake
from megarl.rollout.process import EngineProcess, engine_command, engine_environment, first_gpu
from megarl.rollout.sglang import Part, write_keys

FIELDS = '''
class Parallel(msgspec.Struct):
    _NS_PATH = "parallel"
    tp_size: A[int, Arg(help="ranks", aliases=["--tensor-parallel-size"])] = 1
    attn_dp_size: A[int, "groups"] = 1
    dp_size: A[int, Arg(help="replicas", resolvable=True)] = 1
    pp_size: A[int, "stages"] = 1
    gpu: A[Optional[int], Derived("set at runtime")] = None
    backend: A[Optional[Literal["a", "b"]], "which"] = None
    gemm_runner_backend: A[str, Arg(help="kernels", cli_name="--gemm-backend")] = "auto"
    replay: A[Optional[bool], Arg(help="bounded", action=argparse.BooleanOptionalAction)] = None
    loras: A[List[LoRARef], Arg(help="a type of its own")] = None
    hidden: A[int, Arg(no_cli=True)] = 0
    by_hand: A[bool, Arg(no_cli=True)] = False
    plain: int = 0
'''
SERVER_ARGS = '''
class ServerArgs:
    def add_cli_args(parser):
        parser.add_argument("--by-hand", action=Deprecated, new_flag="--other")
        parser.add_argument("--monokernel-backend", choices=["amd"])
'''


def make_sglang(folder: Path, version: str = VERSION, route: str = "/begin_weight_update") -> str:
    """A package that looks like SGLang, and a Python that finds it."""
    fields, server = folder / "sglang/srt/arg_groups/fields", folder / "sglang/srt/entrypoints"
    for path in (fields, server, folder / f"sglang-{version}.dist-info"):
        path.mkdir(parents=True)
    (folder / "sglang/__init__.py").write_text("raise RuntimeError('was imported')")
    (fields / "parallel.py").write_text(FIELDS)
    (folder / "sglang/srt/server_args.py").write_text(SERVER_ARGS)
    (server / "http_server.py").write_text(f'@app.post("{route}")\ndef begin(): ...\n')
    (folder / f"sglang-{version}.dist-info/METADATA").write_text(
        f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}")
    return wrapper(folder / "python", f'PYTHONPATH="{folder}" exec "{sys.executable}" "$@"')


def wrapper(path: Path, line: str) -> str:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good")
    write_files(path)
    return path


def config(folder: Path, interpreter: str = "/s/bin/python", sglang: dict[str, Any] | None = None,
           **sections: dict[str, Any]) -> Config:
    """The good config with SGLang."""
    tree = copy.deepcopy(good_tree(folder))
    sections["rollout"] = {"engine": "sglang", "sglang_python": interpreter, **sections.get("rollout", {})}
    for name, changes in sections.items():
        tree[name] = {**tree.get(name, {}), **changes}
    return build({**tree, "sglang": sglang or {}})


def told(*args: Any, **kwargs: Any) -> list[str]:
    return [mistake.line() for mistake in check(config(*args, **kwargs), environ={}).mistakes]


def test_command_on_gpus(folder):
    made = config(folder, sglang={"tp_size": 4, "disable_radix_cache": True, "log_requests": False,
                                  "quantization": None, "cuda_graph_bs": [1, 2],
                                  "json_model_override_args": {"a": 1}},
                  cluster={"device": "cuda"}, rollout={"engines_per_rank": 2})
    partition = Partition(rank=12, world=13, local_rank=4, trainers=11, rollouts=2)  # 3 trainers, 2 rollout ranks here
    command = engine_command(made, 1, first_gpu(made, partition), "10.0.0.1", 5, "own-1.1-2-77")
    assert command[:3] == ["/s/bin/python", "-m", "sglang.launch_server"]
    assert command[3:13] == ["--model-path", str(folder / "model"), "--host", "10.0.0.1", "--port", "5", "--dtype",
                             "float32", "--weight-version", "own-1.1-2-77"]
    rest = command[13:]
    assert rest[:2] == ["--log-level-http", "warning"] and rest[2] == "--random-seed" and rest[3].isdigit()
    # 3 trainers, two engines of the rank before, one of its own, on 4 GPUs each
    assert rest[4:] == ["--base-gpu-id", "15", "--tp-size", "4", "--disable-radix-cache", "--cuda-graph-bs", "1", "2",
                        "--json-model-override-args", '{"a": 1}']


def test_an_engine_over_several_ranks(folder):
    made = config(folder, sglang={"tp_size": 16}, cluster={"device": "cuda", "trainers": 8, "rollouts": 4},
                  rollout={"gpus_per_rank": 8})
    assert (gpus(made), nodes(made)) == (16, 2)
    commands = [engine_command(made, 0, first_gpu(made, Partition(8 + index, 12, 0, 8, 4)), "10.0.0.1", 5,
                               f"own-2.0-1-{index}", Part(index % 2, 2, "10.0.0.3:77")) for index in (2, 3)]
    rests = [command[command.index("--base-gpu-id"):] for command in commands]
    for node, rest in enumerate(rests):
        assert rest == ["--base-gpu-id", "0", "--tp-size", "16", "--nnodes", "2", "--node-rank", str(node),
                        "--dist-init-addr", "10.0.0.3:77"]
    seeds = {command[command.index("--random-seed") + 1] for command in commands}
    assert len(seeds) == 1  # all ranks of an engine draw the same
    halves = config(folder, sglang={"tp_size": 8}, cluster={"device": "cuda", "trainers": 8, "rollouts": 4},
                    rollout={"gpus_per_rank": 4})  # two rollout ranks on a host of 8
    assert [first_gpu(halves, Partition(8 + local, 12, local, 8, 4)) for local in (0, 1)] == [0, 4]


@pytest.mark.parametrize("sglang, rollout, rollouts, words", [
    ({"tp_size": 12}, {"gpus_per_rank": 8}, 2, "rollout.gpus_per_rank: an engine of 12 GPUs (sglang.tp_size x pp_size) "
     "does not fill ranks of 8; make the engine a multiple of 8 GPUs"),
    ({"tp_size": 16}, {"gpus_per_rank": 8}, 3, "cluster.rollouts: engines of 2 ranks each (rollout.gpus_per_rank) on 3 "
     "ranks; use a multiple of 2"),
    ({"tp_size": 16}, {"gpus_per_rank": 8, "engines_per_rank": 2}, 2, "rollout.engines_per_rank: an engine of 16 GPUs "
     "takes 2 ranks of 8 whole; use 1"),
    ({"tp_size": 4}, {"gpus_per_rank": 8, "engines_per_rank": 3}, 1, "rollout.engines_per_rank: 3 engines of 4 GPUs on "
     "a rank's 8; use at most 2"),
    ({}, {"urls": ["http://node7:30000/v1"]}, 1, "rollout.urls.0: 'http://node7:30000/v1' is not an engine's address; "
     "for example http://node7:30000, without a path"),
    ({}, {"urls": ["http://h:1", "http://h:1"]}, 1, "rollout.urls.1: http://h:1 is there twice; name each engine once"),
    ({}, {}, 0, "cluster.rollouts: no rank starts engines, and no engine is named; use 1 or more, or give "
     "rollout.urls")])
def test_engines_that_do_not_fit_their_ranks(folder, sglang, rollout, rollouts, words):
    made = config(folder, sglang=sglang, rollout=rollout, cluster={"rollouts": rollouts})
    assert [mistake.line() for mistake in check_engines(made)] == [words]


def test_engines_of_others_need_no_sglang_here(folder):
    assert told(folder, "/nowhere", {"tp_size": 2}, rollout={"urls": ["http://[::1]:30000", "http://h-1.x:8"]},
                cluster={"rollouts": 0}) == []
    assert [host_of(url) for url in ("http://[::1]:30000", "https://h-1.x:8")] == ["::1", "h-1.x"]


def test_keys_stand_in_a_file_of_this_user_alone(folder, tmp_path):
    path = tmp_path / "logs" / "engine-0.0.keys.yaml"
    write_keys(path, Keys("sesame", "open"))
    write_keys(path, Keys("sesame2", "open2"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert yaml.safe_load(path.read_text()) == {"api-key": "sesame2", "admin-api-key": "open2"}
    command = engine_command(config(folder), 0, 0, "h", 5, "v-1", keys_file=path)
    assert command[-2:] == ["--config", str(path)] and "sesame" not in " ".join(command)


def test_a_prefix_runs_sglang_elsewhere(folder, tmp_path):
    """The options are asked for where they will be used; this host need not have that interpreter."""
    inner = make_sglang(tmp_path)
    container = wrapper(tmp_path / "container", f'[ "$1" = exec ] && shift && shift && exec "{inner}" "$@"')
    prefix = [container, "exec"]
    made = {"rollout": {"sglang_prefix": prefix}}
    assert told(folder, "/in/there/python", {"tp_size": 2}, **made) == []
    assert told(folder, "/in/there/python", {"tp_sise": 2}, **made) == [
        "sglang.tp_sise: ServerArgs has no such field; did you mean sglang.tp_size?"]
    command = engine_command(config(folder, "/in/there/python", **made), 0, 0, "h", 5, "v-1")
    assert command[:3] == [*prefix, "/in/there/python"]
    assert told(folder, "python", rollout={"sglang_prefix": ["nowhere-to-be-found"]}) == [
        "rollout.sglang_prefix: nowhere-to-be-found is not a program; name a program of this host"]


@pytest.mark.parametrize("ours, theirs, words", [
    ("(2, 29, 7)", "(2, 29, 7)", None), ("2 << 32 | 29 << 16 | 7", "(2, 29, 7)", None),
    ("(2, 29, 7)", "2 << 32 | 30 << 16 | 7", "rollout.sglang_python: its torch loads NCCL 2.30.7, the trainers' torch "
     "NCCL 2.29.7: they refuse to exchange weights; install nvidia-nccl-cu12 or -cu13 ==2.30.7 in both environments"),
    ("(2, 9, 7)", "(2, 10, 7)", "install nvidia-nccl-cu12 or -cu13 ==2.10.7 in both"),
    (None, "(2, 29, 7)", None), ("(2, 29, 7)", None, None),
    ("(2, 29, 7)", "broken", "rollout.sglang_python: asking for the version of NCCL failed: ")])
def test_both_sides_must_load_the_same_nccl(folder, tmp_path, monkeypatch, ours, theirs, words):
    """Against two fake torches; the real one of a CPU knows no NCCL."""
    def environment(name: str, version: str | None) -> str:
        (tmp_path / name / "torch").mkdir(parents=True)
        (tmp_path / name / "torch/__init__.py").write_text("raise SystemExit(1)" if version == "broken" else (
            "class _C: pass\n" + (f"_C._nccl_version = staticmethod(lambda: {version})" if version else "")))
        return wrapper(tmp_path / name / "python", f'PYTHONPATH="{tmp_path / name}" exec "{sys.executable}" "$@"')

    here, made = environment("ours", ours), config(folder, environment("theirs", theirs))
    monkeypatch.setattr(sys, "executable", here)
    if words is None:
        check_nccl(made)
    else:
        with pytest.raises(UserMistake) as caught:
            check_nccl(made)
        assert words in caught.value.line()


def test_command_on_a_cpu(folder):
    command = engine_command(config(folder, sglang={"max_total_tokens": 4096, "random_seed": 9}), 0, 0, "::1", 5, "v-1")
    assert command[0] == "/s/bin/python" and Path(command[1]).is_file()
    assert Path(command[1]).parts[-3:] == ("rollout", "sglang_cpu", "launch.py")
    rest = command[command.index("v-1") + 1:]
    assert rest == ["--log-level-http", "warning", "--random-seed", "9", "--device", "cpu", "--attention-backend",
                    "torch_native", "--disable-overlap-schedule", "--skip-server-warmup", "--max-total-tokens", "4096"]


def test_every_incarnation_draws_other_numbers_whatever_its_process(folder):
    def seed(version: str, run: int = 0) -> str:
        command = engine_command(config(folder, run={"seed": run}), 0, 0, "h", 5, version)
        return command[command.index("--random-seed") + 1]

    assert seed("own-0.0-1-77") == seed("own-0.0-1-5")
    assert len({seed("own-0.0-1-7"), seed("own-0.0-2-7"), seed("own-1.0-1-7"), seed("own-0.0-1-7", run=1)}) == 4


def test_environment_is_its_own(monkeypatch):
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "PYTHONPATH", "VIRTUAL_ENV", "KEPT"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PATH", "/bin")
    other, own = engine_environment("/s/bin/python"), engine_environment()
    assert other["PATH"] == "/s/bin:/bin" and own["PATH"] == "/bin"
    assert not {"PYTHONPATH", "VIRTUAL_ENV"} & set(other) and {"PYTHONPATH", "VIRTUAL_ENV"} <= set(own)
    for found in (other, own):
        assert not {"RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"} & set(found) and found["KEPT"] == "x"
        assert found["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"


def test_arguments_are_read_from_the_sources_without_an_import(tmp_path):
    found = installation(make_sglang(tmp_path))
    known = found.arguments
    assert found.version == VERSION
    assert set(known) == {"tp_size", "attn_dp_size", "dp_size", "pp_size", "backend", "gemm_backend", "replay",
                          "no_replay", "loras", "by_hand", "monokernel_backend"}
    assert known["tp_size"] is int and known["no_replay"] is known["by_hand"] is bool


def test_good_options_pass_and_another_version_is_noted(folder, tmp_path):
    options = {"tp_size": 2, "backend": "a", "gemm_backend": "x", "no_replay": True, "loras": 7, "attn_dp_size": 2}
    report = check(config(folder, make_sglang(tmp_path / "same"), options), environ={})
    assert report.mistakes == [] and report.notes == []
    report = check(config(folder, make_sglang(tmp_path / "newer", "0.6.0")), environ={})
    assert report.mistakes == [] and report.notes == [f"SGLang 0.6.0: megarl was written against {VERSION}"]


@pytest.mark.parametrize("options, words", [
    ({"tp_sise": 2}, "sglang.tp_sise: ServerArgs has no such field; did you mean sglang.tp_size?"),
    ({"tp_size": "two"}, "sglang.tp_size: 'two' does not fit ServerArgs.tp_size; give a value of the type int"),
    ({"host": "0.0.0.0"}, "sglang.host: cannot be set here; megarl chooses it"),
    ({"nnodes": 2}, "sglang.nnodes: cannot be set here; set rollout.gpus_per_rank; it follows from that"),
    ({"api_key": "x"}, "sglang.api_key: cannot be set here; set MEGARL_API_KEY and MEGARL_ADMIN_KEY, or neither"),
    ({"pp_size": 2}, "sglang.pp_size: a broadcast reaches tensor-parallel ranks; an engine of several pipeline stages "
                     "would take weights wrongly; use 1 and raise sglang.tp_size, or sync.transport: disk"),
    ({"dp_size": 2}, "sglang.dp_size: SGLang refuses weight updates of an engine with replicas; use 1 and raise "
                     "rollout.engines_per_rank, or set sglang.attn_dp_size for attention"),
])
def test_wrong_options(folder, tmp_path, options, words):
    assert told(folder, make_sglang(tmp_path), options) == [words]


def test_weights_and_sglang(folder, tmp_path):
    interpreter = make_sglang(tmp_path)
    assert told(folder, interpreter, {"pp_size": 2}, sync={"transport": "disk"}) == []
    assert told(folder, interpreter, sync={"transport": "delta"}) == []
    assert told(folder, interpreter, sync={"transport": "delta"}, rollout={"urls": ["http://10.0.0.7:30000"]}) == [
        "sync.transport: SGLang takes changed weights through a relay that megarl starts beside it: not for engines "
        "that others started, or of several hosts; use broadcast or disk"]
    (line,) = told(folder, interpreter, sync={"verify": True})
    assert line.startswith("sync.verify: SGLang's checksums are of its own fused tensors")
    assert told(folder, interpreter, sync={"verify": True}, rollout={"engines_per_rank": 2}) == []


def test_an_environment_that_will_not_do(folder, tmp_path):
    old = make_sglang(tmp_path / "old", "0.5.10", "/update_weights_from_tensor")
    without = wrapper(tmp_path / "without", f'exec "{sys.executable}" -S "$@"')
    broken = wrapper(tmp_path / "broken", "exit 3")
    for interpreter, words in ((old, f"SGLang 0.5.10 of {old} knows no begin_weight_update and end_weight_update"),
                               (without, f"{without} has no package sglang"),
                               (broken, f"{broken} does not work as a Python"),
                               (str(tmp_path / "nothing"), "nothing is not a program")):
        (line,) = told(folder, interpreter)
        assert line.startswith("rollout.sglang_python: ") and words in line and VERSION in line


def test_the_embedded_engine_needs_no_sglang(folder):
    assert told(folder, "/nowhere", {"tp_size": 2}, rollout={"engine": "embedded"}) == []


def test_a_supervisor_says_so_before_it_starts_anything(folder, tmp_path):
    from megarl.rollout.supervisor import supervise

    with pytest.raises(UserMistake, match="/nowhere is not a program"):
        supervise(config(folder, "/nowhere"), Partition(2, 3, 0, 2, 1), None, tmp_path)
    assert environment(sys.executable, {"A": "b"}) == {"A": "b"}


def test_what_an_ended_server_said_last(tmp_path):
    """SGLang's log goes on after the exception that ended it; an old exception is not the reason."""
    def words(lines: list[str]) -> str:
        (tmp_path / "log").write_text("\n".join(lines))
        return EngineProcess("engine 0.0", ("h", 1), "v", tmp_path / "log", 0, None)._last_words()

    noise = [f"[2026] kill_process_tree called {n}" for n in range(40)]
    assert words(["Traceback", "AssertionError: too many ranks", *noise[:9]]) == "AssertionError: too many ranks"
    assert words(["torch.cuda.OutOfMemoryError: 3 GB", "ValueError: x", *noise[:2]]) == "ValueError: x"
    assert words(["requests.exceptions.ConnectionError: refused", *noise]) == noise[-1]
