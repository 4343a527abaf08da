"""Every process group and store has a timeout of its own, read from the sources (by default it is half an hour)."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAKERS = {"init_process_group": "timeout", "new_group": "timeout", "new_subgroups": "timeout", "TCPStore": "timeout",
          "FileStore": "timeout", "rendezvous": "timeout", "ProcessGroupGloo": "timeout",
          "initialize_model_parallel": "distributed_timeout_minutes"}


def makers(source: str) -> dict[int, tuple[str, set[str]]]:
    """Line -> (name, keywords) of the calls that make a group or a store."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in MAKERS:
                found[node.lineno] = name, {keyword.arg for keyword in node.keywords}
    return found


def test_every_group_has_a_timeout() -> None:
    calls = {(path.relative_to(ROOT), line): call for folder in ("megarl", "tools")
             for path in sorted((ROOT / folder).rglob("*.py")) for line, call in makers(path.read_text()).items()}
    assert len(calls) > 8  # else nothing is looked at any more
    wrong = [f"{path}:{line}: {name}" for (path, line), (name, given) in calls.items() if MAKERS[name] not in given]
    assert not wrong, "\n".join(wrong)


def test_one_without_is_found() -> None:
    assert makers("import torch.distributed as dist\ndist.new_group([0], timeout=t)\ndist.new_group([1])\n") == {
        2: ("new_group", {"timeout"}), 3: ("new_group", set())}
