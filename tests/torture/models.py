"""Models that change while they are served, and models that do what none should."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
from footprint import pulses
from ground import MIB, Ground, Missed, Terms
from hooked_bundle import write_bundle
from scenarios import scenario
from serving import write_adder

from native_service.client import AsyncClient, CallFailed

SWAPS, LEAK_MIB = 6, 400

# What it does is the first number of a row.
MOODS = {
    "right": 0,
    "slow": 1,
    "talkative": 2,
    "raising": 3,
    "nan": 4,
    "wide": 5,
    "nothing": 6,
    "leaking": 7,
    "dying": 8,
    "exiting": 9,
    "endless": 10,
}
MOODY_HOOKS = """
import ctypes, os, sys, time
import numpy as np
from nereid_backend.hooks import NamedArray, register_model

held = []

def preprocess(inputs):
    x = dict(inputs)["x"]
    mood = int(x.max(initial=0))
    if mood == 1:
        time.sleep(1)
    elif mood == 2:
        for _ in range(500):
            print("x" * 1000)
            print("y" * 1000, file=sys.stderr)
        print("z" * 1_000_000)
    elif mood == 3:
        raise ValueError("what a mood")
    elif mood == 5:
        x = np.concatenate([x, x], 1)
    elif mood == 6:
        return []
    elif mood == 7:
        held.append(np.ones(8 * 2**20))
    elif mood == 8:
        ctypes.string_at(0)
    elif mood == 9:
        os._exit(3)
    elif mood == 10:
        while True:
            pass
    return [NamedArray("x", x)]

def postprocess(outputs):
    y = outputs[0].array
    return [NamedArray("y", np.where(y == 8, np.nan, y).astype(np.float32))]

register_model(preprocess=preprocess, postprocess=postprocess)
"""


def moody(folder: Path) -> None:
    write_bundle(folder / "models" / "moody", MOODY_HOOKS)


async def _asked(client: AsyncClient, mood: str) -> str:
    """How a call in this mood ended: right, nan, or the name of its status."""
    row = np.array([[MOODS[mood], 0, 0, 0]], np.float32)
    try:
        output = (await client.infer("moody", row, timeout_s=30))["y"]
    except CallFailed as error:
        return error.status
    if np.isnan(output).any():
        return "nan"
    if not np.array_equal(output, row * 2):
        raise Missed(f"moody gave {output.tolist()} when it was {mood}")
    return "right"


@scenario(Terms(models=", options: {time_limit_s: 8}"), prepare=moody)
async def a_model_misbehaves(ground: Ground) -> None:
    """It leaks, sleeps, spins, crashes, prints megabytes, gives NaN or wrong shapes: its own call alone suffers."""
    endings = {
        "right": ("right", "slow", "talkative", "leaking"),
        "nan": ("nan",),
        "INTERNAL": ("raising", "wide", "nothing"),
        "UNAVAILABLE": ("dying", "exiting"),
        "DEADLINE_EXCEEDED": ("endless",),
    }
    expected = {mood: ending for ending, moods in endings.items() for mood in moods}
    async with AsyncClient(ground.served.state["address"], attempts=1) as client:
        for mood in [*expected, *ground.random.sample([*expected], 4)]:
            if (ended := await _asked(client, mood)) != expected[mood]:
                raise Missed(f"a call of a model that is {mood} ended as {ended}")
            begun = time.monotonic()
            while (ended := await _asked(client, "right")) != "right":
                if time.monotonic() > begun + 60:
                    raise Missed(f"moody does not answer after it was {mood}: {ended}")
                await asyncio.sleep(0.1)
            ground.recovery_s = max(ground.recovery_s, time.monotonic() - begun)
    await ground.recovers()


@scenario(prepare=moody)
async def a_model_leaks_until_it_is_killed(ground: Ground) -> None:
    """As by the kernel for want of memory: its memory is back, it serves again, and nobody else notices."""
    async with AsyncClient(ground.served.state["address"], attempts=1) as client:
        while (held := _held(ground, "moody")) < LEAK_MIB * MIB:
            if (ended := await _asked(client, "leaking")) != "right":
                raise Missed(f"a leaking model answers {ended} at {held // MIB} MiB")
        os.kill(ground.pid_of("moody"), signal.SIGKILL)
        begun = time.monotonic()
        while await _asked(client, "right") != "right":
            if time.monotonic() > begun + 60:
                raise Missed("moody is not back")
            await asyncio.sleep(0.1)
        ground.recovery_s = time.monotonic() - begun
    if _held(ground, "moody") > LEAK_MIB * MIB // 2:
        raise Missed("its memory is not back")


def _held(ground: Ground, role: str) -> int:
    return sum(pulse.held_bytes for pulse in pulses(ground.served).values() if pulse.role == role)


def moving(folder: Path) -> None:
    write_adder(folder / "models" / "moving.onnx")


@scenario(prepare=moving)
async def models_are_swapped_under_load(ground: Ground) -> None:
    """Every call gets the answer of one version or the next, none fails; broken versions change nothing."""
    address, amounts, over = ground.served.state["address"], {1.0}, False

    async def ask() -> None:
        row = np.zeros((1, 4), np.float32)
        async with AsyncClient(address) as client:
            while not over:
                allowed = set(amounts)
                try:
                    got = float((await client.infer("moving", row, timeout_s=60))["output"][0, 0])
                except CallFailed as error:
                    ground.load.blame(f"moving: {error.status}: {error}")
                    return
                if got not in allowed | amounts:
                    ground.load.blame(f"moving added {got}, {sorted(allowed | amounts)} would do")

    asking = [asyncio.create_task(ask()) for _ in range(2)]
    model, fresh = ground.folder / "models" / "moving.onnx", ground.folder / "moving.onnx"
    for number in range(SWAPS):
        amount = float(number + 2)
        is_broken = ground.random.random() < 0.4
        write_adder(fresh, amount)
        if is_broken:
            fresh.write_bytes(fresh.read_bytes()[:-20])
        else:
            amounts.add(amount)
        fresh.replace(model)
        if await ground.reload() == is_broken:
            raise Missed(f"a reload of a {'broken' if is_broken else 'good'} version ended the wrong way")
        if not is_broken:
            amounts.intersection_update({amount})
    over = True
    await asyncio.gather(*asking)
    await ground.recovers()


@scenario(prepare=moving)
async def reloads_come_in_a_storm(ground: Ground) -> None:
    """Signals and commands to read the settings again, dozens at once while models change: the last state is served."""
    model = ground.folder / "models" / "moving.onnx"
    for number in range(20):
        write_adder(ground.folder / "moving.onnx", float(number))
        (ground.folder / "moving.onnx").replace(model)
        with contextlib.suppress(ProcessLookupError):
            os.kill(ground.served.process.pid, signal.SIGHUP)
        await asyncio.sleep(ground.random.uniform(0, 0.3))
    deadline = time.monotonic() + 90
    async with AsyncClient(ground.served.state["address"]) as client:
        while (await client.infer("moving", np.zeros((1, 4), np.float32)))["output"][0, 0] != 19:
            if time.monotonic() > deadline:
                raise Missed("the last version is not served")
            await asyncio.sleep(0.2)
    await ground.recovers()
