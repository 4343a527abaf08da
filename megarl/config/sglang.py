"""SGLang's own environment as the config check sees it: whether it is there, its version, its options.

Its Python only says where the package lies; what the package can do is read from its source files, because importing
it takes long and needs a GPU.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megarl.config import options
from megarl.config.schema import Config
from megarl.errors import UserMistake

VERSION = "0.5.23"  # whose protocol megarl was written against and tested with
OWNED = {
    "model_path": "set model.path", "dtype": "set model.dtype", "weight_version": "publishing names the weights",
    **dict.fromkeys(("host", "port"), "megarl chooses it"),
    **dict.fromkeys(("api_key", "admin_api_key"), "set MEGARL_API_KEY and MEGARL_ADMIN_KEY, or neither"),
    "config": "give its options here",
    **dict.fromkeys(("nnodes", "node_rank", "dist_init_addr"), "set rollout.gpus_per_rank; it follows from that")}
_HOW_TO_GET = (f"run bash launch/setup_sglang.sh (CPU), or pip install sglang=={VERSION} into an environment of its "
               "own, and give its python")
_OF_ONE_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_ASK = """\
import importlib.metadata, importlib.util, json, pathlib
spec = importlib.util.find_spec("sglang")
if not (spec and spec.origin):
    print("null")
else:
    srt = pathlib.Path(spec.origin).parent / "srt"
    read = lambda path: path.read_text(encoding="utf-8")
    print(json.dumps({
        "version": importlib.metadata.version("sglang"),
        "updates": any("/begin_weight_update" in read(path) for path in (srt / "entrypoints").rglob("*.py")),
        "fields": [read(path) for path in sorted((srt / "arg_groups" / "fields").glob("*.py"))],
        "server_args": read(srt / "server_args.py")}))"""
_ASK_NCCL = """\
import torch
version = getattr(torch._C, "_nccl_version", None)
version = version and version()
print(".".join(map(str, version[:3] if isinstance(version, tuple) else
                   (version >> 32, version >> 16 & 65535, version & 65535))) if version else "")"""


@dataclass(frozen=True)
class Installation:
    """SGLang as a Python finds it.

    Attributes:
        version: its.
        arguments: of its server, see `server_arguments`.
    """

    version: str
    arguments: Mapping[str, Any]


def python(config: Config) -> str:
    """The interpreter of SGLang's environment."""
    return config.rollout.sglang_python or sys.executable


def environment(interpreter: str, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a program of `interpreter`: one of another environment finds the packages and tools there only."""
    if interpreter == sys.executable:
        return dict(environ)
    kept = {name: value for name, value in environ.items() if name not in _OF_ONE_PYTHON}
    return {**kept, "PATH": os.pathsep.join(filter(None, [os.path.dirname(interpreter), kept.get("PATH")]))}


@cache
def installation(interpreter: str, prefix: tuple[str, ...] = ()) -> Installation:
    """Ask an interpreter for SGLang, without importing it.

    Args:
        interpreter: a program; where `prefix` is given, as it is called in there.
        prefix: words that run it elsewhere (`rollout.sglang_prefix`).
    Raises:
        UserMistake: there is no such interpreter, or no SGLang in its environment, or one without the calls
            begin_weight_update and end_weight_update.
    """
    where = "rollout.sglang_python"
    if shutil.which((*prefix, interpreter)[0]) is None:
        raise UserMistake(f"{(*prefix, interpreter)[0]} is not a program", "rollout.sglang_prefix" if prefix else where,
                          "name a program of this host" if prefix else _HOW_TO_GET)
    try:
        found = json.loads(_ask(interpreter, prefix, _ASK))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise UserMistake(f"{interpreter} does not work as a Python: {error}", where, _HOW_TO_GET) from error
    if found is None:
        raise UserMistake(f"{interpreter} has no package sglang", where, _HOW_TO_GET)
    if not found["updates"]:
        raise UserMistake(f"SGLang {found['version']} of {interpreter} knows no begin_weight_update and "
                          "end_weight_update: its weights cannot be updated as one", where, f"use SGLang {VERSION}")
    return Installation(found["version"], server_arguments(found["fields"], found["server_args"]))


def _ask(interpreter: str, prefix: tuple[str, ...], code: str) -> str:
    """What a program prints in an interpreter's environment."""
    return subprocess.run([*prefix, interpreter, "-c", code], capture_output=True, text=True, check=True, cwd="/",
                          timeout=600 if prefix else 60, env=environment(interpreter, os.environ)).stdout


def check_nccl(config: Config) -> None:
    """Compare the NCCL that this environment loads with SGLang's: one broadcast cannot join two versions.

    Both torches are imported for it, which takes seconds. Nothing is compared where one of them has no NCCL.

    Raises:
        UserMistake: they differ; both are named.
    """
    try:
        ours, theirs = (_ask(*at, _ASK_NCCL).strip() for at in (
            (sys.executable, ()), (python(config), tuple(config.rollout.sglang_prefix))))
    except (OSError, subprocess.SubprocessError) as error:
        raise UserMistake(f"asking for the version of NCCL failed: {error}", "rollout.sglang_python",
                          "torch must be importable there") from error
    if ours and theirs and ours != theirs:
        raise UserMistake(f"its torch loads NCCL {theirs}, the trainers' torch NCCL {ours}: they refuse to exchange "
                          "weights", "rollout.sglang_python",
                          f"install nvidia-nccl-cu12 or -cu13 =={max(ours, theirs, key=_numbers)} in both "
                          "environments, or use images with the same NCCL")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def check(config: Config, notes: list[str]) -> Iterator[UserMistake]:
    """Mistakes in `rollout.engine: sglang` and in `sglang: {...}`; `notes` gets what is allowed and may surprise."""
    fields: dict[str, Any] = {}
    if config.rollout.engine == "sglang":
        yield from _sizes(config)
        try:
            if config.cluster.rollouts:  # else engines are others' affair
                found = installation(python(config), tuple(config.rollout.sglang_prefix))
                fields = found.arguments
                if found.version != VERSION:
                    notes.append(f"SGLang {found.version}: megarl was written against {VERSION}")
                if config.cluster.device not in ("cpu", "auto"):
                    check_nccl(config)
        except UserMistake as mistake:
            yield mistake
    yield from options.check_fields("sglang", config.sglang, fields, OWNED, "ServerArgs")


def _sizes(config: Config) -> Iterator[UserMistake]:
    """What SGLang could do and megarl's weight updates could not."""
    sizes = config.sglang
    if sizes.get("dp_size", 1) != 1 and not sizes.get("enable_dp_attention"):
        yield UserMistake("SGLang refuses weight updates of an engine with replicas", "sglang.dp_size",
                          "use 1 and raise rollout.engines_per_rank, or set sglang.attn_dp_size for attention")


def server_arguments(fields: Sequence[str], server_args: str) -> dict[str, Any]:
    """SGLang's server arguments and their types, by the names of their flags with underscores.

    An Arg may give the flag another name, or none. A switch that can be turned off (`--no-name`) is also there as
    `no_name`.

    Args:
        fields: sources of `srt/arg_groups/fields`, whose classes have annotated fields `name: A[type, help or Arg()]`.
        server_args: source of `srt/server_args.py`, which adds some by hand.
    """
    found: dict[str, Any] = {}
    without_flag: dict[str, Any] = {}
    for source in fields:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                arguments, has_flag = _argument(node.target.id, node.annotation)
                (found if has_flag else without_flag).update(arguments)
    for node in ast.walk(ast.parse(server_args)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument") and node.args:
            name = _name(node.args[0])
            found.setdefault(name, without_flag.get(name, Any))
    return found


def _argument(name: str, annotation: ast.expr) -> tuple[dict[str, Any], bool]:
    """One field's arguments ({} if it is none, two if it can be turned off), and whether the field makes the flag."""
    if not (isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "A"
            and isinstance(annotation.slice, ast.Tuple)):
        return {}, False
    kind, meta = annotation.slice.elts[:2]
    given = {word.arg: word.value for word in meta.keywords} if isinstance(meta, ast.Call) else {}
    if isinstance(meta, ast.Call) and ast.unparse(meta.func) != "Arg":
        return {}, False
    name = _name(given["cli_name"]) if "cli_name" in given else name
    found = {name: options.evaluate(kind)}
    if "action" in given and ast.unparse(given["action"]).endswith("BooleanOptionalAction"):
        found[f"no_{name}"] = bool
    return found, "no_cli" not in given


def _name(flag: ast.expr) -> str:
    """`"--tp-size"` -> tp_size."""
    return ast.literal_eval(flag).removeprefix("--").replace("-", "_")
