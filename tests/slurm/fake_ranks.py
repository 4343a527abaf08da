"""Ranks that count instead of training, in place of megarl.train: they start at once and need next to no processor.

Rank 0 hosts the meeting place. A step is a word from rank 0 to every other trainer and back, so a lost trainer makes
rank 0 wait, as a collective would. Rollout ranks only listen. What a run does is in FAKE: `mistake` and `bug` end rank
1 at its second step, `hang` stops rank 0 in its first life at step 5, `unsaved` neither saves nor stops when asked.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from megarl.errors import MachineFault, UserMistake, run_main, write_exit

STEP_S, SAVE_EVERY, LOST_S = 0.1, 5, 120.0


def main(argv: list[str]) -> None:
    """Play this rank."""
    first = int(os.environ.get("MEGARL_FIRST_RANK", 0))
    rank, trainers = first + int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) if not first else 0
    host, _, port = os.environ["MEGARL_CONTROL"].rpartition(":")
    if rank == 0:
        with socket.create_server(("", int(port))) as server:
            lead(server, trainers, Path(os.environ["MEGARL_RUN_DIR"]))
    else:
        follow(rank, bool(first), host, int(port))


def lead(server: socket.socket, trainers: int, run: Path) -> None:
    """Count steps until told to stop."""
    peers: dict[int, socket.socket] = {}
    threading.Thread(target=accept, args=(server, peers), daemon=True).start()
    while not all(rank in peers for rank in range(1, trainers)) or len(peers) < trainers:  # one rollout rank at least
        time.sleep(0.05)
    saved = run / "saved.json"
    step = json.loads(saved.read_text()) if saved.exists() else 0
    print("starts after step", step, flush=True)
    while True:
        if os.environ.get("FAKE") == "hang" and step == 5 and os.environ["MEGARL_LIFE"].endswith(".1"):
            time.sleep(600)
        step += 1
        for rank in range(1, trainers):
            peers[rank].sendall(b"%d\n" % step)
            peers[rank].settimeout(LOST_S)
            if not peers[rank].recv(1):
                raise MachineFault(f"rank {rank} is gone")
        replace(run / "heartbeat.json", {"step": step})
        stop = (run / "STOP").exists() and os.environ.get("FAKE") != "unsaved"
        if stop or step % SAVE_EVERY == 0 and os.environ.get("FAKE") != "unsaved":
            replace(saved, step)
            (run / "checkpoints" / f"step_{step:08d}").mkdir(parents=True, exist_ok=True)
        if stop or step == int(os.environ.get("FAKE_STEPS", 1 << 30)):
            for peer in peers.values():
                with suppress(OSError):
                    peer.sendall(b"end\n")
            if stop:
                write_exit(run, 0, "stopped on request")
            return
        time.sleep(STEP_S)


def accept(server: socket.socket, peers: dict[int, socket.socket]) -> None:
    """Take who comes; who comes again replaces its earlier self."""
    while True:
        connection, _ = server.accept()
        life, rank = connection.recv(100).decode().split()
        if life == os.environ["MEGARL_LIFE"]:
            peers[int(rank)] = connection
            print("rank", rank, "has come", flush=True)


def follow(rank: int, samples: bool, host: str, port: int) -> None:
    """Answer until told to end."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=5.0)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    connection.settimeout(LOST_S)
    connection.sendall(f"{os.environ['MEGARL_LIFE']} {rank}".encode())
    for line in connection.makefile():
        if line == "end\n":
            return
        if rank == 1 and int(line) % SAVE_EVERY == 2:
            if os.environ.get("FAKE") == "mistake":
                raise UserMistake("7 is too much", "some.key", "use 6")
            if os.environ.get("FAKE") == "bug":
                raise ValueError("this should not happen")
        if not samples:
            connection.sendall(b".")
    raise MachineFault("rank 0 is gone")


def replace(path: Path, value: object) -> None:
    """Write a JSON file, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
