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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megarl.config import options
from megarl.config.schema import Config
from megarl.errors import UserMistake

VERSION = "0.5.23"  # whose protocol megarl was written against and tested with
OWNED = {
    "model_path": "set model.path", "dtype": "set model.dtype", "weight_version": "publishing names the weights",
    **dict.fromkeys(("host", "port"), "megarl chooses it"),
    "config": "give its options here",
    **dict.fromkeys(("nnodes", "node_rank", "dist_init_addr"), "an engine lives on one host in this version")}
_HOW_TO_GET = (f"run bash launch/setup_sglang.sh (CPU), or pip install sglang=={VERSION} into an environment of its "
               "own, and give its python")
_OF_ONE_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_ASK = """\
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("sglang")
origin = spec and spec.origin
print(json.dumps([origin, origin and importlib.metadata.version("sglang")]))"""


@dataclass(frozen=True)
class Installation:
    """SGLang as a Python finds it."""

    package: Path
    version: str


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
def installation(interpreter: str) -> Installation:
    """Ask an interpreter for SGLang, without importing it.

    Raises:
        UserMistake: there is no such interpreter, or no SGLang in its environment, or one without the calls
            begin_weight_update and end_weight_update.
    """
    where = "rollout.sglang_python"
    if shutil.which(interpreter) is None:
        raise UserMistake(f"{interpreter} is not a program", where, _HOW_TO_GET)
    try:
        asked = subprocess.run([interpreter, "-c", _ASK], capture_output=True, text=True, timeout=60, check=True,
                               cwd="/", env=environment(interpreter, os.environ))
        origin, version = json.loads(asked.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise UserMistake(f"{interpreter} does not work as a Python: {error}", where, _HOW_TO_GET) from error
    if origin is None:
        raise UserMistake(f"{interpreter} has no package sglang", where, _HOW_TO_GET)
    found = Installation(Path(origin).parent, version)
    sources = (found.package / "srt" / "entrypoints").rglob("*.py")
    if not any("/begin_weight_update" in path.read_text(encoding="utf-8") for path in sources):
        raise UserMistake(f"SGLang {version} of {interpreter} knows no begin_weight_update and end_weight_update: its "
                          "weights cannot be updated as one", where, f"use SGLang {VERSION}")
    return found


def check(config: Config, notes: list[str]) -> Iterator[UserMistake]:
    """Mistakes in `rollout.engine: sglang` and in `sglang: {...}`; `notes` gets what is allowed and may surprise."""
    fields: dict[str, Any] = {}
    if config.rollout.engine == "sglang":
        yield from _sizes(config)
        try:
            found = installation(python(config))
        except UserMistake as mistake:
            yield mistake
        else:
            fields = server_arguments(found.package)
            if found.version != VERSION:
                notes.append(f"SGLang {found.version}: megarl was written against {VERSION}")
    yield from options.check_fields("sglang", config.sglang, fields, OWNED, "ServerArgs")


def _sizes(config: Config) -> Iterator[UserMistake]:
    """What SGLang could do and megarl's weight updates could not."""
    sizes = config.sglang
    if sizes.get("pp_size", 1) != 1:
        yield UserMistake("weights are sent to tensor-parallel ranks; an engine of several pipeline stages would take "
                          "them wrongly", "sglang.pp_size", "use 1 and raise sglang.tp_size")
    if sizes.get("dp_size", 1) != 1 and not sizes.get("enable_dp_attention"):
        yield UserMistake("SGLang refuses weight updates of an engine with replicas", "sglang.dp_size",
                          "use 1 and raise rollout.engines_per_rank, or set sglang.attn_dp_size for attention")
    if config.sync.verify:
        yield UserMistake("SGLang's checksums are of its own fused tensors and cannot be compared", "sync.verify",
                          "set it to false, or use rollout.engine: embedded")


def server_arguments(package: Path) -> dict[str, Any]:
    """SGLang's server arguments and their types, by the names of their flags with underscores.

    They are the annotated fields `name: A[type, help or Arg(...)]` of the classes in `srt/arg_groups/fields`, and what
    `srt/server_args.py` adds by hand. An Arg may give the flag another name, or none. A switch that can be turned off
    (`--no-name`) is also there as `no_name`.
    """
    found: dict[str, Any] = {}
    without_flag: dict[str, Any] = {}
    for path in sorted((package / "srt" / "arg_groups" / "fields").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                arguments, has_flag = _argument(node.target.id, node.annotation)
                (found if has_flag else without_flag).update(arguments)
    for node in ast.walk(ast.parse((package / "srt" / "server_args.py").read_text(encoding="utf-8"))):
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
