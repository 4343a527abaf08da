"""One engine as a child process: its command, its environment, its log, its health and its end."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import aiohttp

from megarl.cluster.keys import ADMIN, API, NO_KEYS, Keys
from megarl.cluster.partition import Partition
from megarl.config import sglang
from megarl.config.engines import gpus, nodes
from megarl.config.schema import Config
from megarl.errors import EXIT_MISTAKE, MachineFault, UserMistake
from megarl.rollout.client import EngineClient, EngineError
from megarl.rollout.sglang import Part, server_command

log = logging.getLogger(__name__)

POLL_S = 0.1
PROGRESS_S = 15.0  # between lines that say that an engine is still starting
GRACE_S = {"embedded": 3.0, "sglang": 9.0}  # between SIGTERM and SIGKILL: SGLang looks for the signal every 5 s
_CHILD = Path(__file__).with_name("child.py")
_RAISED = re.compile(r"[\w.]*(Error|Exception): ")  # the last line of a traceback
_LAST_LINES = 30
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
# An engine that inherits these takes part in the trainers' rendezvous (or hangs in its own), or ends their run.
_NOT_INHERITED = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                  "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MEGARL_RUN_DIR", API, ADMIN)


def first_gpu(config: Config, partition: Partition) -> int:
    """The first GPU of a rollout rank's SGLang engines: after its host's trainers and the rollout ranks before it.

    A host's ranks are consecutive, as torchrun and srun give them out.
    """
    trainers = max(partition.trainers - (partition.rank - partition.local_rank), 0)
    each = config.rollout.engines_per_rank * (gpus(config) // nodes(config))
    return (0 if config.cluster.device == "cpu" else trainers) + (partition.local_rank - trainers) * each


def engine_command(config: Config, number: int, first_gpu: int, host: str, port: int, version: str,
                   part: Part | None = None, keys_file: Path | None = None) -> list[str]:
    """The command line of an engine.

    Args:
        config: `rollout.engine` says which one.
        number: of this engine within its rollout rank.
        first_gpu: of the rollout rank; an SGLang engine takes the GPUs from first_gpu + number * its own number on,
            unless `sglang.base_gpu_id` is set.
        host, port: where it listens.
        version: name of the weights it starts with, which no trainer published.
        part, keys_file: of SGLang, see `server_command`.
    """
    common = ["--model-path", config.model.path, "--host", host, "--port", str(port),
              "--dtype", _DTYPES[config.model.dtype], "--weight-version", version]
    if config.moe.replay == "engine":  # both engines know it by this name
        common.append("--enable-return-routed-experts")
    if config.rollout.engine == "embedded":
        return [sys.executable, "-m", "megarl.rollout.embedded", *common, "--slots", str(config.rollout.slots),
                *(("--prefix-tokens", str(config.rollout.prefix_tokens)) if config.environments else ()),
                "--update-timeout", str(config.sync.timeout_s)]
    return server_command(config, common, first_gpu + number * gpus(config), version, part, keys_file)


def engine_environment(interpreter: str = sys.executable, keys: Keys = NO_KEYS) -> dict[str, str]:
    """This process's environment for an engine that `interpreter` runs: with keys, without the launcher's variables."""
    kept = {name: value for name, value in os.environ.items()
            if name not in _NOT_INHERITED and not name.startswith("TORCHELASTIC_")}
    # its health must not wait for the end of a pause
    return {**sglang.environment(interpreter, kept), **keys.environment(),
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}


def free_port(host: str) -> int:
    """A port that was free a moment ago; whoever starts there must cope with having lost it since."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def is_taken(host: str, port: int) -> bool:
    """Whether a socket is bound to the port now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
            return False
        except OSError as error:
            return error.errno == errno.EADDRINUSE


def socket_address(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class EngineProcess:
    """A running engine; made by `start`.

    Attributes:
        name: for logs.
        url: where it listens once it is up.
        log_path: its stdout and stderr, appended.
    """

    def __init__(self, name: str, address: tuple[str, int], version: str, log_path: Path, log_offset: int,
                 process: asyncio.subprocess.Process, keys: Keys = NO_KEYS) -> None:
        self.name, self.url, self.log_path = name, f"http://{socket_address(*address)}", log_path
        self._address, self._version, self._log_offset, self._process = address, version, log_offset, process
        self._keys = keys

    @classmethod
    async def start(cls, name: str, command: list[str], address: tuple[str, int], version: str, log_path: Path, *,
                    interpreter: str = sys.executable, keys: Keys = NO_KEYS) -> EngineProcess:
        """Start `command` in a process group of its own, killed by the kernel if this process dies.

        Must be called from the main thread: the kernel's promise is bound to the thread that forks. The log is for
        this user alone: SGLang writes all its arguments there, keys too.

        Args:
            interpreter: that the command runs, perhaps after a prefix.
            keys: that the server takes.
        """
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
            file.write(f"--- {' '.join(command)}\n".encode())
            file.flush()
            offset = file.tell()
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(_CHILD), str(os.getpid()), *command, stdin=asyncio.subprocess.DEVNULL, stdout=file,
                stderr=asyncio.subprocess.STDOUT, env=engine_environment(interpreter, keys), start_new_session=True)
        return cls(name, address, version, log_path, offset, process, keys)

    @property
    def pid(self) -> int:
        """Its process id, also of its process group."""
        return self._process.pid

    async def wait_healthy(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        """Until it answers /health and proves by its weight version that it is this process.

        The proof matters: another process may have taken the port since it was picked.

        Raises:
            UserMistake: it ended with status 64; the message is its own.
            MachineFault: it ended otherwise, or did not answer in time.
        """
        client = EngineClient(self.url, session, control_timeout_s=5.0, retries=0, keys=self._keys)
        begun, told = time.monotonic(), 0.0
        while True:
            if self._process.returncode is not None:
                raise self.death()
            try:
                await client.health()
                info = await client.model_info()
                if info.weight_version == self._version:
                    return
            except EngineError:
                pass  # not yet: connection refused while it loads; the deadline below bounds it
            waited = time.monotonic() - begun
            if waited > timeout_s:
                raise MachineFault(f"{self.name} did not answer within {timeout_s:.0f} s; see {self.log_path}")
            if waited - told > PROGRESS_S:
                told = waited
                log.info("%s is starting (%.0f s); log: %s", self.name, waited, self.log_path)
            await asyncio.sleep(POLL_S)

    async def wait_death(self, session: aiohttp.ClientSession, silence_s: float) -> MachineFault | UserMistake:
        """Return why it died, once it has: it ended, or answered no health check for `silence_s`."""
        interval = min(5.0, silence_s / 4)
        client = EngineClient(self.url, session, control_timeout_s=interval, retries=0)
        heard = time.monotonic()
        while True:
            try:
                await asyncio.wait_for(self._process.wait(), interval)
                return self.death()
            except TimeoutError:
                pass  # the good case: it still runs
            try:
                await client.health()
                heard = time.monotonic()
            except EngineError as error:
                if time.monotonic() - heard > silence_s:
                    return MachineFault(f"{self.name} has been silent for {silence_s:.0f} s: {error}")

    async def wait_end(self) -> MachineFault | UserMistake:
        """Return why it died, once its process has ended."""
        await self._process.wait()
        return self.death()

    def death(self) -> MachineFault | UserMistake:
        """Why an ended process ended, with its own last words.

        Status 64 is no mistake of the user's if another process holds the port: megarl picked it.
        """
        code = self._process.returncode
        if code == EXIT_MISTAKE and not is_taken(*self._address):
            return UserMistake(self._last_words(whole_message=True))
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return MachineFault(f"{self.name} {cause}; {self.log_path} ends: {self._last_words()}")

    def _last_words(self, whole_message: bool = False) -> str:
        """What its log ends with: everything from the last line that begins with `error: ` on, or the last exception
        (SGLang goes on to say how it kills its children), or else the last line."""
        with open(self.log_path, "rb") as file:
            file.seek(self._log_offset)
            lines = [line for line in file.read().decode("utf-8", errors="replace").splitlines() if line.strip()]
        starts = [place for place, line in enumerate(lines) if line.startswith("error: ")]
        if whole_message and starts:
            return "\n".join(lines[starts[-1]:]).removeprefix("error: ")
        raised = [line for line in lines[-_LAST_LINES:] if _RAISED.match(line)]
        return raised[-1][:500] if raised else lines[-1][-500:] if lines else "(nothing)"

    async def stop(self, grace_s: float) -> None:
        """End it by SIGTERM, `grace_s` later by SIGKILL, and then whatever is left of its process group.

        Only the main process gets the SIGTERM: SGLang takes the end of one of its children for a crash.
        """
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), grace_s)
            except TimeoutError:
                log.warning("%s did not end %.0f s after SIGTERM, killing it", self.name, grace_s)
        self._signal(signal.SIGKILL)
        await self._process.wait()

    async def kill(self) -> None:
        """End it and its process group at once."""
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass  # nobody is left, which is what a signal is for
