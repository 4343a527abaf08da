"""Measures the nodes of a job and finds the bad ones: python tools/preflight.py [options]

Run it on every node at the same time, with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT set (slurm/lib.sh does that);
without them this machine is the only node. The first node prints a table and ends with 0, or with 75 if a node is bad.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from dataclasses import fields
from pathlib import Path

from megarl.cluster.preflight import Floors, table
from megarl.errors import MachineFault, run_main


def main(argv: list[str]) -> None:
    """Examine, print, write the list of bad nodes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("."), help="where the run will write; shared by all nodes")
    parser.add_argument("--bad", type=Path, help="write the bad nodes here, a line each: its name and why")
    parser.add_argument("--deadline", type=float, default=180.0, help="seconds until every node must have reported")
    for floor in fields(Floors):
        parser.add_argument(f"--{floor.name.replace('_', '-')}", type=float, default=floor.default,
                            help="see Floors in megarl/cluster/preflight.py (%(default)s)")
    arguments = parser.parse_args(argv)
    from megarl.cluster.probe import Place, examine

    place = Place(os.environ.get("SLURMD_NODENAME", platform.node()), int(os.environ.get("NNODES", 1)),
                  int(os.environ.get("NODE_RANK", 0)), os.environ.get("MASTER_ADDR", "127.0.0.1"),
                  int(os.environ.get("MASTER_PORT", 0)))
    floors = Floors(**{floor.name: getattr(arguments, floor.name) for floor in fields(Floors)})
    verdict = examine(place, arguments.folder, floors, arguments.deadline)
    if verdict is None:
        return
    print(table(verdict.reports, verdict.found))
    for note in verdict.notes:
        print(f"note: {note}")
    if verdict.allreduce_gbps is not None:
        print(f"all-reduce over all good nodes: {verdict.allreduce_gbps:.3g} GB/s")
    bad = {name: "; ".join(problems) for name, problems in verdict.found.items() if problems}
    if arguments.bad:
        arguments.bad.write_text("".join(f"{name} {why}\n" for name, why in bad.items()))
    if bad:
        raise MachineFault(f"{len(bad)} of {len(verdict.reports)} nodes are bad: {', '.join(bad)}")
    if verdict.notes:
        raise MachineFault("; ".join(verdict.notes))


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
