"""Make the tasks with tools: prompts, tokenizer and a warm-started tiny model. Does nothing if it is there already.

    python tools/make_tool_tasks.py --out runs/tool-tasks
"""

from __future__ import annotations

from megarl.examples import command
from megarl.examples.tool_tasks import Options, make

if __name__ == "__main__":
    command.run(__doc__.splitlines()[0], Options, make,
                "{parameters:,} parameters, loss {loss:.3f}")
