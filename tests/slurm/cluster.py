"""A real Slurm on this one host, thrown away at the end: slurmctld, munged and a slurmd for each "node".

A node has network, host name, processes and mounts of its own (Linux namespaces on a bridge), so that it can lose its
power: the kernel then kills every process of it at once, and its link is gone for the others. Needs root, slurm-wlm and
munge; touches nothing outside its folder but the namespaces, which go with it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from interfere import no_namespaces

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare")
CPUS, MEMORY_MB = 8, 8000  # what a node says it has
_CONF = """
ClusterName=throwaway
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/spool/%n.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
ReturnToService=2
SlurmdTimeout={silence}
KillWait=5
MinJobAge=3600
JobRequeue=1
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
{nodes}
PartitionName=train Nodes={names} Default=YES MaxTime=60 State=UP
"""


def why_not() -> str:
    """Why a cluster cannot be made here; "" if it can."""
    if os.geteuid():
        return "a Slurm of one's own needs root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} here; on Debian: apt-get install slurm-wlm munge iproute2"
    return no_namespaces()


class Cluster:
    """A running Slurm; made by `cluster`.

    Attributes:
        folder: of its own.
        nodes: their names.
    """

    def __init__(self, folder: Path, count: int, subnet: str, silence_s: int) -> None:
        self.folder, self.nodes = folder, [f"n{number}" for number in range(1, count + 1)]
        self._subnet, self._silence_s = subnet, silence_s
        self._prefix = f"mg{os.getpid() % 100000:x}"  # an interface's name has at most 15 letters
        self._inits: dict[str, subprocess.Popen[bytes]] = {}
        self._environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    # --- clients

    def call(self, *command: str, **environ: str) -> str:
        """Output of a Slurm command."""
        done = subprocess.run(command, env={**self._environ, **environ}, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def submit(self, *arguments: str, **environ: str) -> str:
        """sbatch; the job's number."""
        return self.call("sbatch", "--parsable", *arguments, **environ).strip()

    def job(self, number: str) -> dict[str, str]:
        """Fields of `scontrol show job`."""
        return dict(re.findall(r"(?:^| )([A-Za-z]\w*)=(\S*)", self.call("scontrol", "-o", "show", "job", number)))

    # --- nodes

    def cut_power(self, node: str) -> None:
        """Kill every process of the node at once, and its link."""
        subprocess.run(["ip", "link", "set", self._link(node), "down"], check=True)
        self._inits[node].kill()  # unshare's child, process 1 of the node, dies with it, and all processes with that
        self._inits.pop(node).wait()

    def boot(self, node: str) -> None:
        """Start the node, again or for the first time."""
        spool, hosts = self.folder / "spool" / node, self.folder / "hosts"
        spool.mkdir(parents=True, exist_ok=True)
        subprocess.run(["ip", "link", "set", self._link(node), "up"], check=True)
        # not `ip netns exec`: it mounts /sys anew, and slurmd then finds no cgroups
        with (self.folder / "log" / f"{node}.out").open("ab") as log:
            self._inits[node] = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self._namespace(node)}", "unshare", "--uts", "--pid", "--mount",
                 "--fork", "--kill-child", "--mount-proc", "bash", "-c",
                 f"hostname {node}; mount --bind {hosts} /etc/hosts; unset SLURM_CONF\n"
                 f"slurmd -D -N {node} -f {self.folder}/slurm.conf & while :; do sleep 3600 & wait $!; done"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def is_off(self, node: str) -> bool:
        """Whether its power was cut."""
        return node not in self._inits

    def state(self, node: str) -> str:
        """idle, mixed, down* ..."""
        return self.call("sinfo", "-h", "-N", "-n", node, "-o", "%T").split()[0]

    def wait_idle(self) -> None:
        """Until all nodes are free."""
        until(lambda: all(self.state(node) == "idle" for node in self.nodes), "the nodes are not idle", 60.0)

    def _namespace(self, node: str) -> str:
        return f"{self._prefix}{node}"

    def _link(self, node: str) -> str:
        return f"{self._prefix}v{node[1:]}"

    # --- the whole

    def _start(self, stack: ExitStack) -> None:
        for name in ("state", "spool", "log", "munge"):
            (self.folder / name).mkdir(mode=0o700 if name == "munge" else 0o755)
        self._make_network(stack)
        host = os.uname().nodename.split(".")[0]
        addresses = {node: f"{self._subnet}.{10 + number}" for number, node in enumerate(self.nodes)}
        (self.folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in {
            "localhost": "127.0.0.1", host: f"{self._subnet}.1", **addresses}.items()))
        key = self.folder / "munge" / "key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(1024))
        socket = f"{self.folder}/munge.sock"
        self._daemon(stack, "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}",
                     f"--pid-file={self.folder}/munge/pid", f"--log-file={self.folder}/munge/log",
                     f"--seed-file={self.folder}/munge/seed")
        until(lambda: self._succeeds("munge", "-S", socket, "-n"), "munged does not answer")
        port = 20000 + os.getpid() % 5000 * 2
        nodes = "\n".join(f"NodeName={node} NodeAddr={address} NodeHostname={node} Port={port + 1} CPUs={CPUS} "
                          f"RealMemory={MEMORY_MB} State=UNKNOWN" for node, address in addresses.items())
        (self.folder / "slurm.conf").write_text(_CONF.format(
            host=host, address=f"{self._subnet}.1", port=port, folder=self.folder, silence=self._silence_s, nodes=nodes,
            names=",".join(self.nodes)))
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        self._daemon(stack, "slurmctld", "-D", "-f", f"{self.folder}/slurm.conf")
        until(lambda: self._succeeds("scontrol", "ping"), "slurmctld does not answer")
        stack.callback(self._end_nodes)
        for node in self.nodes:
            self.boot(node)
        self.wait_idle()

    def _make_network(self, stack: ExitStack) -> None:
        def ip(*words: str, check: bool = True) -> None:
            subprocess.run(["ip", *words], check=check, capture_output=True)

        bridge = f"{self._prefix}br"
        stack.callback(ip, "link", "del", bridge, check=False)
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"{self._subnet}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for number, node in enumerate(self.nodes):
            namespace, link = self._namespace(node), self._link(node)
            stack.callback(ip, "netns", "del", namespace, check=False)
            stack.callback(ip, "link", "del", link, check=False)
            ip("netns", "add", namespace)
            ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            ip("link", "set", link, "master", bridge, "up")
            ip("-n", namespace, "addr", "add", f"{self._subnet}.{10 + number}/24", "dev", "eth0")
            for each in ("eth0", "lo"):
                ip("-n", namespace, "link", "set", each, "up")

    def _daemon(self, stack: ExitStack, *command: str) -> None:
        with (self.folder / "log" / f"{command[0]}.out").open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environ)
        stack.callback(process.wait)
        stack.callback(process.terminate)

    def _end_nodes(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(["scancel", "--user=root"], env=self._environ, capture_output=True, timeout=10)
        for node in list(self._inits):
            self.cut_power(node)

    def _succeeds(self, *command: str) -> bool:
        return subprocess.run(command, env=self._environ, capture_output=True).returncode == 0


@contextmanager
def cluster(folder: Path, nodes: int, subnet: str = "", silence_s: int = 10) -> Iterator[Cluster]:
    """A cluster of so many nodes, all idle.

    Args:
        folder: empty; for its configuration, state and logs.
        subnet: the first three numbers of a /24 that nobody uses here; by default by this process's number.
        silence_s: SlurmdTimeout, after which slurmctld gives up a node that does not answer (clusters have 300).
    """
    subnet = subnet or f"10.{80 + os.getpid() % 40}.{os.getpid() // 40 % 250}"
    made = Cluster(folder, nodes, subnet, silence_s)
    with ExitStack() as stack:
        made._start(stack)
        yield made


def until(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """The condition's result once it is true; AssertionError with `what` after the time."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} after {timeout_s:.0f} s"
        time.sleep(0.2)
    return found

