"""The direction of imports, the word cuda, and the size of modules and functions, read from the sources."""

from __future__ import annotations

import ast
import io
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megarl"
FILES = sorted(PACKAGE.rglob("*.py"))

MAX_MODULE, MAX_FUNCTION, MAX_TRAIN = 400, 60, 120  # lines

# modules that must not load these packages, whatever they load on the way
HEAVY = ("megatron", "sglang", "transformer_engine")
NO_TORCH = ("torch", "transformers", *HEAVY)
PURE = {  # prefix of module -> packages it must never reach
    "megarl.config": NO_TORCH,
    "megarl.errors": NO_TORCH,
    "megarl.launch": NO_TORCH,
    "megarl.versions": NO_TORCH,
    "megarl.data.sample": NO_TORCH,
    "megarl.data.packing": NO_TORCH,
    "megarl.model.hf_config": NO_TORCH,
    "megarl.reward.registry": NO_TORCH,
    **dict.fromkeys(("megarl.rollout.admission", "megarl.rollout.overlap"), NO_TORCH),
    "megarl.objective": (*HEAVY, "torch.distributed"),
    "megarl.pipeline.schedule": NO_TORCH,
    "megarl.pipeline.check": NO_TORCH,
    **dict.fromkeys((f"megarl.pipeline.{name}" for name in (
        "generators", "simulate", "choose", "order", "cost_model", "compare", "draw", "trace")), NO_TORCH),
    "megarl.model.families": (*HEAVY, "torch.distributed"),
    "megarl.plan": NO_TORCH,
    "megarl.rollout.embedded": ("megatron", "sglang", "megarl.update"),
    "megarl.rollout": ("megarl.update",),
    "megarl.reward": ("megarl.update",),
}
# where the word cuda may stand: in cluster/, the transports of sync/, the GPU part of pipeline/, and as the value of
# cluster.device in the config
CUDA = ("megarl/cluster/", "megarl/sync/broadcast", "megarl/pipeline/gpu", "megarl/config/schema.py")
OTHERS_NAMES = ("get_cuda_rng_tracker",)  # of Megatron-core, on any device


def module_name(path: Path) -> str:
    """megarl/config/load.py -> megarl.config.load; a package goes by its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(path: Path, lazy: bool) -> set[str]:
    """Modules that a file imports, with the names taken from them ("torch.distributed" for `from torch import
    distributed`); `lazy` adds those inside functions. What only a type checker sees is left out."""
    found: set[str] = set()
    stack: list[ast.AST] = [parsed(path)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif _is_type_checking(node) or (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy):
            continue
        stack.extend(ast.iter_child_nodes(node))
    return found


def reached(module: str) -> dict[str, str]:
    """Everything that importing a module loads, of megarl and of others, each with the file that names it.

    Imports inside functions count for the module itself (it runs them), not for those that it imports.
    """
    found: dict[str, str] = {}
    queue = [(module, True)]
    seen: set[str] = set()
    while queue:
        name, lazy = queue.pop()
        for parent in [name, *(name.rsplit(".", k)[0] for k in range(1, name.count(".") + 1))]:
            if parent in seen or parent not in MODULES:
                continue
            seen.add(parent)
            for target in imports(MODULES[parent], lazy and parent == module):
                found.setdefault(target, str(MODULES[parent].relative_to(ROOT)))
                queue.append((target, False))
    return found


def uses_distributed(path: Path) -> bool:
    """Whether the source names torch.distributed as an attribute, which `import torch` alone makes possible."""
    return any(isinstance(node, ast.Attribute) and node.attr == "distributed" and isinstance(node.value, ast.Name)
               and node.value.id == "torch" for node in ast.walk(parsed(path)))


def covered(prefix: str) -> list[str]:
    return [name for name in MODULES if name == prefix or name.startswith(f"{prefix}.")]


@pytest.mark.parametrize("prefix", PURE)
def test_direction_of_imports(prefix: str) -> None:
    wrong = []
    for module in covered(prefix):
        for target, file in reached(module).items():
            for package in PURE[prefix]:
                if target == package or target.startswith(f"{package}."):
                    wrong.append(f"{module} loads {target} (named in {file})")
        if "torch.distributed" in PURE[prefix] and uses_distributed(MODULES[module]):
            wrong.append(f"{module} uses torch.distributed")
    assert not wrong, "\n".join(wrong)


def test_only_the_program_sees_everything() -> None:
    """Nothing imports train.py; the update is not imported by what it is made of."""
    below = ("config", "cluster", "data", "objective", "model", "pipeline", "reward", "rollout")
    wrong = [f"{module} imports {target}" for module, path in MODULES.items() for target in imports(path, lazy=True)
             if f"{target}.".startswith("megarl.train.")
             or (target.startswith("megarl.update") and module.split(".")[1:2] and module.split(".")[1] in below)]
    assert not wrong, "\n".join(wrong)


def test_the_word_cuda_stands_where_it_may() -> None:
    """In code (names and strings); comments and docstrings may explain."""
    wrong = []
    for path in FILES:
        name = str(path.relative_to(ROOT))
        if name.startswith(CUDA):
            continue
        docstrings = {node.body[0].value.lineno for node in ast.walk(parsed(path))
                      if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                      and ast.get_docstring(node, clean=False) is not None}
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if (token.type != tokenize.COMMENT and token.start[0] not in docstrings
                    and token.string not in OTHERS_NAMES and "cuda" in token.string.lower()):
                wrong.append(f"{name}:{token.start[0]}: {token.line.strip()}")
    assert not wrong, "\n".join(wrong)


def test_modules_and_functions_are_small() -> None:
    wrong = []
    for path in FILES:
        name, lines = str(path.relative_to(ROOT)), len(path.read_text(encoding="utf-8").splitlines())
        if lines > (limit := MAX_TRAIN if name == "megarl/train.py" else MAX_MODULE):
            wrong.append(f"{name}: {lines} lines, over {limit}")
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION:
                    wrong.append(f"{name}:{node.lineno}: {node.name} has {length} lines, over {MAX_FUNCTION}")
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is() -> None:
    assert [str(path.relative_to(ROOT)) for path in FILES if not ast.get_docstring(parsed(path))] == []
