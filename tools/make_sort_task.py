"""Make the quickstart's task: prompts, tokenizer and a warm-started tiny model. Does nothing if it is there already.

    python tools/make_sort_task.py --out runs/sort-task
"""

from __future__ import annotations

from megarl.examples import command
from megarl.examples.warm_start import Options, make

if __name__ == "__main__":
    command.run(__doc__.splitlines()[0], Options, make,
                "{parameters:,} parameters, held-out reward {sampled:.3f} sampled, {greedy:.3f} greedy")
