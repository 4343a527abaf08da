"""Many random faults of each kind in small whole runs: python tests/bench/faults.py [--seed N] [--count 20] [KIND ...]

Prints a table: what was hit in which state, how long until all engines served again, and what the run shows in the
end. Ends with status 1 if something was trained twice, or a run hung or ended.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import faults  # noqa: E402
from faults import FAULTS, Fault, Run, check, make_faults, tree  # noqa: E402
from interfere import OTHERWISE, SPOILED, Proxy, hosts, no_namespaces  # noqa: E402

from megarl.rollout.process import free_port  # noqa: E402


def main() -> None:
    """Run the kinds asked for, one run each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; none: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20, help="faults of each kind")
    parser.add_argument("--lag", type=int, default=1, help="rollout.max_lag")
    options = parser.parse_args()
    bad = False
    for kind in options.kinds or KINDS:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            bad |= KINDS[kind](Path(folder), kind, options)
    sys.exit(bad)


def supervised(folder: Path, kind: str, options: argparse.Namespace) -> bool:
    """Faults of engines that have a supervisor; the run goes on until all were made."""
    begun = time.monotonic()
    with Run(folder, tree(folder, 100_000, options.seed, options.lag)) as run:
        made = make_faults(run, [kind] * options.count, options.seed, engines=2)
        return report(run, kind, made, begun)


def report(run: Run, kind: str, made: list[Fault], begun: float) -> bool:
    """Three more steps must come; then end the run and print its line."""
    goal = len(run.metrics()) + 3
    faults.until(lambda: len(run.metrics()) >= goal or run.ended, "no step after the last fault", 60.0)
    went_on = not run.ended
    run.stop()
    shown = check(run)
    backs = sorted(fault.back_s for fault in made)
    states = Counter(fault.what.partition(",")[0] for fault in made)
    print(f"{kind:20} {len(made):3} faults in {time.monotonic() - begun:4.0f} s, {shown.steps:4} steps; "
          f"{shown.samples} samples, trained twice {shown.twice}, missing {shown.missing}; serving again after "
          f"{backs[len(backs) // 2]:.1f} s (at most {backs[-1]:.1f}); went on: {went_on}")
    print(f"{'':20} hit: " + ", ".join(f"{count} x {state}" for state, count in states.most_common(6)))
    print(f"{'':20} metrics: " + ", ".join(f"{name.removeprefix('rollout/')} {value:.0f}"
                                           for name, value in sorted(shown.sums.items()) if value), flush=True)
    return bool(shown.twice) or not went_on


def garbage(folder: Path, kind: str, options: argparse.Namespace) -> bool:
    """Engines behind proxies that spoil every seventh answer, until `count` of each kind of spoiling were made."""
    begun, ports = time.monotonic(), [free_port("127.0.0.1") for _ in range(2)]
    with ExitStack() as stack:
        stack.enter_context(faults.external_engines(folder, ports))
        proxies = [stack.enter_context(Proxy(f"http://127.0.0.1:{port}", options.seed + port, 1 / 7)) for port in ports]
        run = stack.enter_context(faults.outside_run(folder, 100_000, options.seed, options.lag,
                                                     [proxy.url for proxy in proxies]))
        done: Counter[str] = Counter()
        while min(done[name] for name in SPOILED + OTHERWISE) < options.count and not run.ended:
            time.sleep(0.5)
            done = proxies[0].done + proxies[1].done
        made = [Fault(kind, 0, name) for name, count in done.items() for _ in range(count)]
        return report(run, kind, made, begun)


def network(folder: Path, kind: str, options: argparse.Namespace) -> bool:
    """Engines on hosts of their own, one of which loses every packet now and then."""
    if why := no_namespaces():
        print(f"{kind}: skipped, {why}")
        return False
    begun, rng = time.monotonic(), random.Random(options.seed)
    with ExitStack() as stack:
        places = stack.enter_context(hosts(2, folder))
        for place in places:
            stack.enter_context(faults.external_engines(folder, [31000], place.prefix, place.address))
        run = stack.enter_context(faults.outside_run(folder, 100_000, options.seed, options.lag,
                                                     [f"http://{place.address}:31000" for place in places]))
        made = [faults.cut_off(run, rng.choice(places), rng) for _ in range(options.count)]
        return report(run, kind, made, begun)


KINDS = {**{kind: supervised for kind in FAULTS}, "garbage": garbage, "network": network}

if __name__ == "__main__":
    main()
