"""The embedded engine's listening socket."""

from __future__ import annotations

import asyncio
import socket

import pytest

from megarl.errors import UserMistake
from megarl.rollout.embedded.__main__ import _bind


def test_answers_are_not_held_back() -> None:
    """asyncio must turn Nagle's algorithm off on the connections that the socket accepts."""
    async def no_delay() -> int:
        bound, found = _bind("127.0.0.1", 0), asyncio.get_running_loop().create_future()

        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(accept, sock=bound):
            _, writer = await asyncio.open_connection(*bound.getsockname())
            result = await found
            writer.close()
        return result

    assert asyncio.run(no_delay())


def test_a_taken_port_is_a_mistake() -> None:
    with _bind("127.0.0.1", 0) as bound:
        bound.listen()
        with pytest.raises(UserMistake, match="cannot listen"):
            _bind("127.0.0.1", bound.getsockname()[1])
