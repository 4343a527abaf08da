"""tools/schedule.py: what it writes, and its mistakes in one line with status 64."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from megarl.errors import EXIT_MISTAKE, run_main
from megarl.pipeline import trace
from megarl.pipeline.choose import model_costs
from megarl.pipeline.generators import SCHEDULES
from megarl.pipeline.simulate import simulate

MAIN = runpy.run_path(str(Path(__file__).parents[2] / "tools/schedule.py"))["main"]


@pytest.fixture
def measured(tmp_path: Path) -> str:
    schedule = SCHEDULES["dualpipev"].generate(4, 9, 2)
    line = simulate(schedule, model_costs(4, 8, [1.0] * 9, (1, 1, 1), hop=0.5))
    trace.write(tmp_path / "step.jsonl", trace.spans(line))
    return str(tmp_path / "step.jsonl")


def test_compare(capsys):
    MAIN(["compare", "--ranks", "8", "--microbatches", "20"])
    rows = {row.split()[1]: row.split("|")[2:-1] for row in capsys.readouterr().out.splitlines()}
    assert [cell.strip() for cell in rows["zb-v"]] == ["63.5", "5.5", "8", "1", ""]
    assert [cell.strip() for cell in rows["dualpipe"]] == ["66", "9.1", "9", "2", ""]
    MAIN(["compare", "--ranks", "3", "--microbatches", "4"])
    out = capsys.readouterr().out
    assert "dualpipe needs an even number of ranks, not 3" in out and "zb-v takes its place" in out


def test_compare_lengths_from_a_file(tmp_path: Path, capsys):
    (tmp_path / "lengths.txt").write_text("900\n100\n2500\n400\n")
    MAIN(["compare", "--ranks", "2", "--lengths", str(tmp_path / "lengths.txt")])
    by_file = capsys.readouterr().out
    MAIN(["compare", "--ranks", "2", "--lengths", "9,1,25,4"])
    assert capsys.readouterr().out == by_file and "ordered" in by_file


def test_draw_and_trace(tmp_path: Path, measured: str, capsys):
    MAIN(["draw", "zb-v", "--ranks", "2", "--lengths", "3,1,2", "--ordered", "--out", str(tmp_path / "new" / "a.svg")])
    assert (tmp_path / "new" / "a.svg").read_text().startswith("<svg")
    MAIN(["draw", "--trace", measured, "--out", str(tmp_path / "a.html")])
    page = (tmp_path / "a.html").read_text()
    assert page.startswith("<!doctype html>") and "predicted: the same operations" in page and ">measured<" in page
    MAIN(["trace", "zb-v", "--trace", measured, "--out", str(tmp_path / "a.json")])
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    said = capsys.readouterr().out
    assert "measured: makespan" in said and "predicted: zb-v" in said


@pytest.mark.parametrize(("words", "said"), [
    ("", "the following arguments are required: command"),
    ("draw zb-v --ranks 2 --microbatches 4", "the following arguments are required: --out"),
    ("draw zbv --ranks 2 --microbatches 4 --out OUT", "invalid choice: 'zbv'"),
    ("draw --ranks 2 --microbatches 4 --out OUT", "give the NAME of a schedule, or --trace"),
    ("draw zb-v --out OUT", "--ranks and one of --microbatches and --lengths are needed"),
    ("compare --ranks 2 --microbatches 4 --lengths 1,2", "--ranks and one of"),
    ("compare --ranks 0 --microbatches 4", "0 is not at least 1"),
    ("compare --ranks 2 --microbatches x", "invalid count value: 'x'"),
    ("compare --ranks 2 --lengths 1,0", "there are none, or one is 0 or above 1e12"),
    ("compare --ranks 2 --lengths 1,b", "not a length: could not convert string to float: 'b'"),
    ("compare --ranks 2 --microbatches 4 --costs 1,2", "1,2 is not three numbers"),
    ("compare --ranks 2 --microbatches 4 --hop -1", "-1 is not a number of at least 0"),
    ("compare --ranks 2 --microbatches 4 --hidden 2", "2 is not a share between 0 and 1"),
    ("draw dualpipe --ranks 3 --microbatches 9 --out OUT", "dualpipe needs an even number of ranks, not 3"),
    ("draw interleaved --ranks 2 --microbatches 4 --chunks 1 --out OUT", "needs at least 2 stages on each rank, not 1"),
    ("draw --trace /nowhere.jsonl --out OUT", "/nowhere.jsonl: cannot be read"),
    ("draw --trace MEASURED --ranks 2 --out OUT", "--trace says the ranks"),
    ("draw 1f1b --trace MEASURED --out OUT", "1f1b has 1 stage on each rank, not 2"),
    ("draw interleaved --trace MEASURED --out OUT", "interleaved has its stages elsewhere than the measured step"),
    ("draw zb-v --ranks 2 --microbatches 4 --out /proc/no/a.svg", "/proc/no/a.svg: cannot be written"),
])
def test_mistakes(words: str, said: str, tmp_path: Path, measured: str, capsys, monkeypatch):
    monkeypatch.delenv("MEGARL_RUN_DIR", raising=False)
    argv = words.replace("OUT", str(tmp_path / "a.svg")).replace("MEASURED", measured).split()
    assert run_main(MAIN, argv) == EXIT_MISTAKE
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.startswith("error: ")
    assert len(err.splitlines()) - err.count("\n  remedy: ") == 1 and not (tmp_path / "a.svg").exists()
