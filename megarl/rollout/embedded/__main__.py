"""`python -m megarl.rollout.embedded --model-path DIR --port N`: serve a Hugging Face checkpoint on this CPU."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time

# Strict reproducible sums: without it a row of a product changes with the number of rows and threads. MKL reads this
# once, so it must be set before torch is imported; a value of the user's own is respected.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

from megarl.cluster.keys import Keys  # noqa: E402
from megarl.errors import UserMistake, run_main  # noqa: E402
from megarl.model.hf_config import HFConfig  # noqa: E402

DTYPES = ("float32", "bfloat16")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        """A wrong command line is a mistake like others."""
        raise UserMistake(message, "command line", f"see python -m {self.prog} --help")


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="megarl.rollout.embedded", description=__doc__)
    parser.add_argument("--model-path", required=True, help="directory with config.json and *.safetensors")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and computation")
    parser.add_argument("--slots", type=int, default=64, help="sequences decoded together")
    parser.add_argument("--prefix-tokens", type=int, default=0,
                        help="tokens of finished sequences whose keys and values are kept for prompts that begin so")
    parser.add_argument("--context-length", type=int, help="prompt and response, tokens; default: the model's own")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; small models are fastest with one")
    parser.add_argument("--weight-version", default="default", help="name of the weights in the directory")
    parser.add_argument("--enable-return-routed-experts", action="store_true",
                        help="record each token's experts, for requests with return_routed_experts")
    parser.add_argument("--update-timeout", type=float, default=120.0, help="of joining a group and of each broadcast")
    parser.add_argument("--parent-pid", type=int, help="end when the parent is no longer this process")
    arguments = parser.parse_args(argv)
    for name in ("slots", "threads", "context_length"):
        if (getattr(arguments, name) or 1) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return arguments


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: taken at once, connections refused until the model is there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named; without it answers wait 40 ms for a delayed ACK
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        raise UserMistake(f"cannot listen on port {port} of {host}: {error.strerror}", "--host, --port",
                          "choose a free port and an address of this host") from error
    return bound


def _end_with(parent: int) -> None:
    """End this process once its parent is another than `parent`."""
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        print("the parent process is gone", file=sys.stderr, flush=True)
        os._exit(0)
    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def main(argv: list[str]) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        UserMistake: the checkpoint cannot be served, or the address is taken.
    """
    begun, arguments, keys = time.monotonic(), _arguments(argv), Keys.from_env(os.environ)
    if arguments.parent_pid is not None:
        _end_with(arguments.parent_pid)
    bound = _bind(arguments.host, arguments.port)
    hf = HFConfig.read(arguments.model_path)
    if arguments.enable_return_routed_experts and not hf.experts:
        raise UserMistake(f"{arguments.model_path} has no experts", "--enable-return-routed-experts", "leave it out")

    import torch  # not above: a mistake found so far is told at once
    import uvicorn

    from megarl.rollout.embedded.auth import RequireKeys
    from megarl.rollout.embedded.decoder import Decoder
    from megarl.rollout.embedded.engine import Engine
    from megarl.rollout.embedded.requests import Limits
    from megarl.rollout.embedded.scheduler import Scheduler
    from megarl.rollout.embedded.server import Server
    from megarl.rollout.embedded.text import Text
    from megarl.rollout.embedded.updates import WeightUpdater
    from megarl.rollout.embedded.weights import Weights

    torch.set_num_threads(arguments.threads)
    text = Text.load(arguments.model_path)
    weights = Weights(hf, getattr(torch, arguments.dtype))
    weights.load_checkpoint(arguments.model_path)
    eos_ids = set(hf.eos_ids) | ({text.eos_id} if text is not None and text.eos_id is not None else set())
    routing = arguments.enable_return_routed_experts
    limits = Limits(hf.vocab, min(arguments.context_length or hf.max_positions, hf.max_positions), routing)
    scheduler = Scheduler(Decoder(weights, routing), arguments.slots, tuple(sorted(eos_ids)), text,
                          arguments.weight_version, arguments.prefix_tokens)
    engine = Engine(scheduler, WeightUpdater(weights, arguments.update_timeout))
    engine.start()
    app = RequireKeys(Server(engine, weights, limits, text, arguments.model_path).app(), keys)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1))
    bound.listen(2048)  # a connection that reads the next line and comes before uvicorn is ready waits
    print(f"serving {arguments.model_path} on http://{arguments.host}:{bound.getsockname()[1]} "
          f"(started in {time.monotonic() - begun:.1f} s)", flush=True)
    server.run(sockets=[bound])


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
