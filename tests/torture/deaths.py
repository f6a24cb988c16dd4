"""Processes that are killed at random moments under load."""

from __future__ import annotations

import asyncio
import signal
import sys

from endings import CALLS_OF_A_KILLED_CLIENT, CLIENT_TO_KILL, infer_request
from footprint import roles
from ground import Ground, Missed, Terms
from scenarios import scenario


@scenario()
async def a_model_is_killed(ground: Ground) -> None:
    """Its callers get UNAVAILABLE until it is back, within a minute at the third death; nobody else notices."""
    for model in ("slow", "large", "adder"):
        await ground.wait_a_while()
        await ground.kill(model)
        await ground.recovers()


@scenario()
async def tritonserver_is_killed(ground: Ground) -> None:
    """All models are loaded again; calls meanwhile end with UNAVAILABLE and none hangs."""
    await ground.wait_a_while()
    await ground.kill("tritonserver")
    await ground.recovers()


@scenario()
async def envoy_is_killed(ground: Ground) -> None:
    """The address is open again at once, with all its permits."""
    for _ in range(3):
        await ground.wait_a_while()
        await ground.kill("envoy")
        await ground.recovers()


@scenario()
async def clients_are_killed(ground: Ground) -> None:
    """Their permits come back; other callers do not notice."""
    for _ in range(8):
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CLIENT_TO_KILL, ground.served.state["address"], infer_request("slow").hex()),
            str(CALLS_OF_A_KILLED_CLIENT),
            stdout=asyncio.subprocess.PIPE,
        )
        assert client.stdout is not None
        await client.stdout.readline()
        await ground.wait_a_while(0.05, 0.5)
        client.kill()
        await client.wait()
    await ground.recovers()


@scenario(Terms(exit_code=-signal.SIGKILL))
async def the_supervisor_is_killed(ground: Ground) -> None:
    """Everything it started ends within seconds, and the next start clears the rest."""
    await ground.wait_a_while()
    started = ground.served.descendants()
    await ground.kill("supervisor")
    await asyncio.to_thread(ground.served.process.wait)
    await ground.until_gone(started)
    await ground.next_start()


@scenario()
async def everything_dies_again_and_again(ground: Ground) -> None:
    """Models, Envoy and tritonserver, in any order, with little time between: it comes back, without being started."""
    for _ in range(6):
        await ground.wait_a_while(0.1, 3.0)
        role = ground.random.choice(("adder", "slow", "large", "job", "envoy", "tritonserver"))
        if role in roles(ground.served).values():  # else it is just being started again
            await ground.kill(role)
    await ground.recovers(within_s=150)


@scenario()
async def a_start_is_killed(ground: Ground) -> None:
    """Servers that are killed while they start leave nothing that the next one does not clear, nor disturb others."""
    for _ in range(4):
        await ground.start_and_kill(ground.random.uniform(0.2, 4.0))
    if ground.served.process.poll() is not None:
        raise Missed("a server beside them has ended")
    await ground.recovers()
