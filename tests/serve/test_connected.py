"""A block that ends when its client leaves, and the quick beginning of calls that seldom wait."""

import asyncio

import pytest
from helpers.serve import run_timeless

from octavo.serve.begun import Begun
from octavo.serve.connected import ClientGone, Connected


class Client:
    def __init__(self):
        self.gone = asyncio.Event()
        self.num_listening = 0

    async def receive(self):
        self.num_listening += 1
        try:
            await self.gone.wait()
        finally:
            self.num_listening -= 1
        return {"type": "http.disconnect"}


async def within(client, work):
    with Connected(client.receive):
        return await work


async def waiting(cancelled):
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        cancelled.append(True)
        raise


def test_work_for_a_client_is_cancelled_when_it_leaves():
    async def test():
        client, cancelled = Client(), []
        working = asyncio.create_task(within(client, waiting(cancelled)))
        await asyncio.sleep(0.01)
        assert not cancelled
        client.gone.set()
        with pytest.raises(ClientGone):
            await working
        assert cancelled
        assert working.cancelling() == 0
        # Who caught it goes on as before.
        assert await within(Client(), asyncio.sleep(0.01, 3)) == 3

    run_timeless(test())


def test_work_that_ends_gives_its_result_or_its_error_and_nobody_listens_any_longer():
    async def bad():
        await asyncio.sleep(0)
        raise ZeroDivisionError

    async def test():
        client = Client()
        assert await within(client, asyncio.sleep(0, 3)) == 3
        with pytest.raises(ZeroDivisionError):
            await within(client, bad())
        await asyncio.sleep(0)
        assert client.num_listening == 0

    run_timeless(test())


@pytest.mark.parametrize("leaves", [False, True])
def test_who_cancels_the_work_is_not_told_that_its_client_left(leaves):
    async def test():
        client, cancelled = Client(), []
        working = asyncio.create_task(within(client, waiting(cancelled)))
        await asyncio.sleep(0.01)
        if leaves:
            client.gone.set()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert cancelled

    run_timeless(test())


def test_a_call_that_need_not_wait_is_over_at_once():
    steps = []

    async def quick():
        steps.append(1)
        return 3

    async def slow():
        steps.append(2)
        try:
            await asyncio.sleep(0.01)
            steps.append(3)
        finally:
            steps.append(4)
        return 5

    async def bad():
        await asyncio.sleep(0)
        raise ZeroDivisionError

    async def test():
        begun = Begun(quick())
        assert (steps, begun.is_done, begun.value) == ([1], True, 3)
        begun = Begun(slow())
        assert (steps, begun.is_done) == ([1, 2], False)
        assert await begun == 5
        assert steps == [1, 2, 3, 4]
        with pytest.raises(ZeroDivisionError):
            await Begun(bad())
        given_up = Begun(slow())
        given_up.close()
        assert steps == [1, 2, 3, 4, 2, 4]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await Begun(slow())
        assert steps == [1, 2, 3, 4, 2, 4, 2, 4]

    run_timeless(test())
