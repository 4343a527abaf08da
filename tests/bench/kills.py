"""Kills a random process of a run at a random moment, seed after seed: `python tests/bench/kills.py [--seeds 50]`.

At lag 0 the end must be equal to the bit to that of an uninterrupted run: samples and their order, weights, masters,
moments, export. At lag 2 no sample may be lost or trained twice. A table; status 1 if a seed fails. A phase can pass
unseen where it is short: then the seed has shown nothing, and does not count.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import kill_anywhere as jobs  # noqa: E402
from kill_anywhere import Kill  # noqa: E402

VERDICTS = {True: "ok", False: "FAIL", None: "-"}


def attempt(folder: Path, seed: int) -> tuple[str, bool | None]:
    """(what happened, whether it was as it must be; None: nobody was killed) of a seed; every third one at lag 2."""
    kill, lag = Kill.draw(seed), 2 if seed % 3 == 2 else 0
    name = f"seed{seed}"
    try:
        statuses = jobs.run(folder, name, lag, kill)
    except AssertionError as error:
        if "never came" in str(error):
            return "its moment never came", None
        return str(error).splitlines()[-1][:200], False
    if lag:
        seen = Counter((line["position"], line["n"]) for line in jobs.samples(folder, name))
        wrong = [] if seen == Counter((position, n) for position in range(jobs.STEPS * jobs.PROMPTS)
                                      for n in range(jobs.SAMPLES)) else ["samples are lost or trained twice"]
    else:
        wrong = jobs.differences(folder, name, "whole")
    return f"lives {len(statuses)}: " + ("; ".join(wrong) or ("all once" if lag else "equal to the bit")), not wrong


def main() -> int:
    """Run the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    verdicts: list[bool | None] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        jobs.prepare(folder)
        jobs.run(folder, "whole")
        for seed in range(options.first, options.first + options.seeds):
            begun, kill = time.monotonic(), Kill.draw(seed)
            told, good = attempt(folder, seed)
            verdicts.append(good)
            print(f"{seed:4d}  lag {2 if seed % 3 == 2 else 0}  {kill.victim:10s} step {kill.step} {kill.phase:10s} "
                  f"+{kill.delay_s:4.2f} s  {VERDICTS[good]:4s} {told} ({time.monotonic() - begun:.0f} s)",
                  flush=True)
    print(f"{verdicts.count(True)} of {len(verdicts) - verdicts.count(None)} as they must be")
    return 1 if False in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
