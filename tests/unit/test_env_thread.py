"""A generator whose thread was ended by code of an environment: told, not waited for."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import numpy as np
import pytest
from rollout_parts import GENERATION, VERSION, NumberedPrompts, make_config, new_store

from megarl.config.schema import SamplingConfig
from megarl.data.sample import Prompt
from megarl.errors import UserMistake
from megarl.rollout.dispatch import Draws
from megarl.rollout.fleet import Fleet
from megarl.rollout.generate import Generator


class Exits:
    """An environment's code that exits in a task of its own, where nobody can catch it."""

    sources = ("talk",)

    async def make(self, *_: Any) -> Any:
        self.task = asyncio.create_task(self._exit())
        await asyncio.sleep(3600)

    async def _exit(self) -> None:
        sys.exit("out of luck")

    async def close(self) -> None:
        pass


def test_an_exit_in_a_task_of_its_own_is_told() -> None:
    config, store = make_config(), new_store()
    generator = Generator(config, NumberedPrompts(), Fleet(store, 1, 1, 60.0), store, Draws(), generation=GENERATION,
                          leader_index=0, leaders=1, vocab_size=9, decode=str, environments=Exits())
    generator.check()
    begun = time.monotonic()
    prompt = Prompt(0, 0, 0, "talk", np.array([1], np.int32))
    for call in (lambda: generator.generate_eval([prompt], SamplingConfig(), 7, version=VERSION), generator.check,
                 lambda: generator.take([0])):
        with pytest.raises(UserMistake, match="SystemExit: out of luck"):
            call()
    generator.close()
    assert time.monotonic() - begun < 5
