"""Counters that the leaders share through the control store while they collect one step's groups.

A round hands out `need` prompt numbers, each once, to whoever asks next; nobody waits for a slow leader's share. When
all of them are resolved, every leader reads the same totals. A step's keys are deleted by leader 0 once all leaders
have left the step, so the store does not grow.
"""

from __future__ import annotations

import asyncio

from torch.distributed import PrefixStore, Store

from megarl.errors import MachineFault
from megarl.rollout.lease import LeaseWatch, read_counter

POLL_LEAST_S, POLL_MOST_S = 0.001, 0.02
_OF_A_ROUND = ("drawn", "kept", "dropped", "resolved")


class SharedCounters:
    """One leader's hold on the shared counters.

    Args:
        store: the control store of this life of the job.
        leader_index, leaders: which leader this is, of how many.
    """

    def __init__(self, store: Store, leader_index: int, leaders: int) -> None:
        self._store = PrefixStore("collect", store.clone())
        self._leader_index, self._leaders = leader_index, leaders
        self._undeleted: dict[int, int] = {}  # leader 0: step -> rounds, of steps that it has left

    def draw(self, step: int, turn: int, need: int) -> int | None:
        """The next of the numbers 0 .. need - 1 of round `turn` of `step`, or None when all are drawn."""
        number = self._store.add(f"{step}/{turn}/drawn", 1) - 1
        return number if number < need else None

    def resolve(self, step: int, turn: int, *, kept: bool, dropped: bool) -> None:
        """Say what became of one drawn number."""
        for name, happened in (("kept", kept), ("dropped", dropped), ("resolved", True)):  # resolved comes last
            if happened:
                self._store.add(f"{step}/{turn}/{name}", 1)

    async def totals(self, step: int, turn: int, need: int, silence_s: float) -> tuple[int, int]:
        """Wait until all `need` numbers are resolved; (kept, dropped), the same on every leader.

        Raises:
            MachineFault: nothing was resolved for `silence_s` although some are open: another leader is lost.
        """
        watch, pause = LeaseWatch(), POLL_LEAST_S
        while (resolved := read_counter(self._store, f"{step}/{turn}/resolved")) < need:
            if watch.observe(resolved) > silence_s:
                raise MachineFault(f"step {step}: {need - resolved} of {need} groups are with other leaders, which "
                                   f"have finished none for {silence_s:.0f} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, POLL_MOST_S)
        return read_counter(self._store, f"{step}/{turn}/kept"), read_counter(self._store, f"{step}/{turn}/dropped")

    def leave(self, step: int, rounds: int) -> None:
        """Done with the step, which had `rounds` rounds; its counters must not be used any more."""
        self._store.add(f"{step}/left", 1)
        if self._leader_index == 0:
            self._undeleted[step] = rounds
            for old, turns in list(self._undeleted.items()):
                if read_counter(self._store, f"{old}/left") == self._leaders:
                    self._delete(old, turns)
                    del self._undeleted[old]

    def _delete(self, step: int, rounds: int) -> None:
        for turn in range(rounds):
            for name in _OF_A_ROUND:
                self._store.delete_key(f"{step}/{turn}/{name}")
        self._store.delete_key(f"{step}/left")
