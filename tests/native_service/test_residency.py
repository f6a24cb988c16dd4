"""Which models are in Triton, in a world of fakes where a seed decides how long everything takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from residency_world import World, run

from native_service.envoy.settings import Place
from native_service.settings import ModelOptions, ResidencySettings
from nereid_backend.errors import EnvoyUnavailable, ModelLoadError, ModelLoading, NotFound, ResourceExhausted

LAZY = ModelOptions(load="first_request", idle_timeout_s=1)
KEPT = ModelOptions(load="first_request")
UNBOUND = ResidencySettings()
SEEDS = range(40)

Scenario = Callable[[World], Coroutine[Any, Any, None]]


def made(folder: Path, settings: ResidencySettings = UNBOUND, seed: int = 0, **models: ModelOptions) -> World:
    return World(folder / str(seed), seed, settings, models)


def state(world: World, name: str = "a") -> str:
    return world.residency.states()[name].state


async def until(world: World, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(600):
        while not condition():
            await asyncio.sleep(0.05)


async def many_calls(world: World, count: int = 40) -> None:
    """Calls that begin at any time within some seconds, so that many meet a model that is about to go or to come."""

    async def one() -> None:
        await asyncio.sleep(world.random.random() * 8)
        await world.call(world.random.choice([name for name in world.names if not name.startswith("hidden")]))

    async with asyncio.TaskGroup() as calls:
        for _ in range(count):
            calls.create_task(one())


def test_no_call_fails_however_it_meets_the_end_of_a_models_time(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await many_calls(world)
        assert world.ended == {"fine": 40}
        await until(world, lambda: not world.triton.loaded)
        assert state(world) == state(world, "b") == "idle"

    for seed in SEEDS:
        run(made(tmp_path, seed=seed, a=LAZY, b=LAZY), scenario)


def test_models_that_take_turns_for_one_place_answer_or_say_when_to_come_back(tmp_path: Path) -> None:
    refused: set[str] = set()

    async def scenario(world: World) -> None:
        await many_calls(world)
        assert world.ended["fine"] > 0
        refused.update(world.ended - world.ended.__class__({"fine": 40}))
        assert world.residency.deallocations["capacity"] >= sum(world.triton.loads.values()) - 1

    for seed in SEEDS:
        bound = ResidencySettings(max_loaded_models=1, min_residency_s=0)
        run(made(tmp_path, bound, seed=seed, a=KEPT, b=KEPT, c=KEPT), scenario)
    busy = "all active models are busy (max_loaded_models is 1)"
    assert refused == {f"ResourceExhausted: model '{name}' has to wait: {busy}" for name in "abc"}


def test_what_a_meta_model_calls_stays_as_long_as_it_may_call(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await many_calls(world)
        assert world.ended == {"fine": 40}
        await until(world, lambda: not world.triton.loaded)
        assert state(world, "hidden") == "idle"

    for seed in SEEDS:
        world = made(tmp_path, seed=seed, hidden=KEPT, a=LAZY, meta=LAZY)
        world.callees["meta"] = ("hidden", "a")
        run(world, scenario)


def test_a_place_for_two_is_enough_for_a_meta_model_and_what_it_calls(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await many_calls(world)
        assert world.ended["fine"] > 10
        assert all(" all active models are busy" in each for each in world.ended if each != "fine"), world.ended

    for seed in SEEDS:
        bound = ResidencySettings(max_loaded_models=2, min_residency_s=0)
        world = made(tmp_path, bound, seed=seed, hidden=KEPT, a=LAZY, b=KEPT, meta=KEPT, c=LAZY)
        world.callees["meta"] = ("hidden", "a")
        run(world, scenario)


def test_callers_of_an_idle_model_wait_for_one_load(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.triton.load_s = 3
        assert state(world) == "idle"
        async with asyncio.TaskGroup() as calls:
            for _ in range(50):
                calls.create_task(world.call("a"))
            await until(world, lambda: state(world) == "loading")
        assert (world.ended, world.triton.loads) == ({"fine": 50}, {"a": 1})
        assert world.residency.states()["a"].cold_starts == 1

    run(made(tmp_path, a=LAZY), scenario)


def test_no_more_callers_wait_than_the_model_takes_at_a_time(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        async with asyncio.TaskGroup() as calls:
            for _ in range(70):
                calls.create_task(world.call("a"))
        assert world.ended == {"fine": 64, "ResourceExhausted: model queue full, retry later": 6}

    run(made(tmp_path, a=LAZY), patient(scenario, load_s=30))


def patient(scenario: Scenario, load_s: float) -> Scenario:
    async def inside(world: World) -> None:
        world.triton.load_s = load_s
        world.random.choice = lambda options: options[-1]  # type: ignore[method-assign] - the longest
        await scenario(world)

    return inside


def test_who_has_too_little_time_is_told_and_the_load_goes_on(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(ModelLoading, match=r"^Model 'a' is currently loading$") as told:
            await world.residency.wake("a", 1.0)
        assert (told.value.code, state(world)) == ("UNAVAILABLE", "loading")
        await world.residency.wake("a")
        assert (state(world), world.triton.loads) == ("ready", {"a": 1})

    run(made(tmp_path, a=LAZY), patient(scenario, load_s=10))


def test_a_load_that_fails_is_told_to_all_who_wait_and_tried_again_by_the_next(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.triton.broken.add("a")
        results = await asyncio.gather(*(world.residency.wake("a") for _ in range(5)), return_exceptions=True)
        assert [str(each) for each in results] == ["model 'a' could not be loaded: no such luck"] * 5
        assert (state(world), world.triton.loads) == ("idle", {"a": 1})
        world.triton.broken.clear()
        await world.residency.wake("a")
        assert state(world) == "ready"
        with pytest.raises(NotFound, match="model 'nobody' is not served here"):
            await world.residency.wake("nobody")

    run(made(tmp_path, a=LAZY), scenario)


def test_a_pinned_model_stays_until_it_is_unpinned(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.residency.pin("a")
        await asyncio.sleep(60)
        before = world.residency.states()["a"]
        assert (before.state, before.pinned, before.memory_bytes) == ("ready", True, 1)
        await world.residency.unpin("a")
        await until(world, lambda: world.residency.deallocations["idle"] == 1)
        after = world.residency.states()["a"]
        assert (after.state, after.pinned, after.memory_bytes) == ("idle", False, 0)
        with pytest.raises(NotFound):
            await world.residency.pin("nobody")

    run(made(tmp_path, a=LAZY, b=ModelOptions(pinned=True, idle_timeout_s=1)), scenario)


def test_the_model_whose_last_call_is_longest_ago_makes_room(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        for name in "abac":
            await world.call(name)
            await asyncio.sleep(1)
        assert (world.ended, world.triton.loaded) == ({"fine": 4}, {"a", "c"})
        await world.residency.pin("a")
        await world.call("b")
        assert world.triton.loaded == {"a", "b"}
        await world.residency.pin("b")
        with pytest.raises(ResourceExhausted, match="all active models are busy") as told:
            await world.residency.wake("c")
        assert (told.value.retry_after_s, world.residency.deallocations["capacity"]) == (5, 2)
        assert world.residency.thrashing == 1  # b was wanted again soon after it had gone

    settings = ResidencySettings(max_loaded_models=2, min_residency_s=0)
    run(made(tmp_path, settings, a=KEPT, b=KEPT, c=KEPT), scenario)


def test_a_model_that_has_just_come_does_not_go_for_another(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.residency.wake("a")
        with pytest.raises(ResourceExhausted):
            await world.residency.wake("b")
        await asyncio.sleep(10)
        await world.residency.wake("b")
        assert world.triton.loaded == {"b"}

    run(made(tmp_path, ResidencySettings(max_loaded_models=1), a=KEPT, b=KEPT), scenario)


def test_a_model_may_have_a_shorter_stay_of_its_own(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        for name in ("brief", "b"):
            await world.residency.wake(name)
            assert world.triton.loaded == {name}
        with pytest.raises(ResourceExhausted):
            await world.residency.wake("brief")

    brief = KEPT.model_copy(update={"min_residency_s": 0.0})
    run(made(tmp_path, ResidencySettings(max_loaded_models=1), brief=brief, b=KEPT), scenario)


def test_the_start_loads_what_there_is_room_for(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        assert world.triton.loaded == {"a", "b"}
        await world.residency.wake("c")
        assert world.triton.loaded == {"b", "c"}

    eager = ModelOptions()
    settings = ResidencySettings(max_loaded_models=2, min_residency_s=0)
    run(made(tmp_path, settings, a=eager, b=eager, c=eager), scenario)


def test_what_all_models_hold_stays_within_its_bound(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.memory_bytes = {"a": 60, "b": 30, "c": 40, "huge": 200}
        for name in "abc":
            await world.residency.wake(name)
        assert world.triton.loaded == {"b", "c"}
        with pytest.raises(
            ModelLoadError, match="model 'huge' holds 200 bytes, memory_budget_bytes is 100; raise that"
        ):
            await world.residency.wake("huge")
        assert (world.triton.loaded, state(world, "huge")) == (set(), "idle")

    settings = ResidencySettings(memory_budget_bytes=100, min_residency_s=0)
    run(made(tmp_path, settings, a=KEPT, b=KEPT, c=KEPT, huge=KEPT), scenario)


def test_a_load_without_memory_is_tried_again_once_another_model_has_gone(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.triton.large = {"large"}
        await world.residency.wake("a")
        await world.residency.wake("large")
        assert world.triton.loaded == {"large"}
        assert (world.residency.deallocations["oom"], world.residency.load_retries) == (1, 1)
        await world.residency.unload("large")
        await world.residency.pin("a")
        with pytest.raises(ResourceExhausted, match="bad_alloc") as told:
            await world.residency.wake("large")
        assert (told.value.retry_after_s, world.triton.loaded) == (5, {"a"})

    run(made(tmp_path, ResidencySettings(min_residency_s=0), a=KEPT, large=KEPT), scenario)


def test_a_model_unloaded_by_name_answers_its_calls_and_comes_back_with_the_next(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.residency.load("a")
        running = asyncio.create_task(world.call("a"))
        await until(world, lambda: world.in_triton["a"] > 0)
        await world.residency.look()
        assert state(world) == "busy"
        await world.residency.unload("a")
        await running
        assert (world.ended, state(world)) == ({"fine": 1}, "idle")
        await world.residency.unload("a")
        await world.call("a")
        assert (world.ended, world.triton.loads["a"]) == ({"fine": 2}, 2)
        assert sum(world.residency.deallocations.values()) == 0  # somebody asked for it

    run(made(tmp_path, a=KEPT), patient(scenario, load_s=1))


def test_a_model_that_a_loaded_one_calls_is_not_unloaded_by_name(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.residency.wake("meta")
        with pytest.raises(ModelLoadError, match="model 'a' is called by meta; unload that first"):
            await world.residency.unload("a")
        await world.residency.unload("meta")
        await world.residency.unload("a")
        assert not world.triton.loaded

    world = made(tmp_path, a=KEPT, meta=KEPT)
    world.callees["meta"] = ("a",)
    run(world, scenario)


def test_an_envoy_that_is_away_keeps_the_model_where_it_is(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.residency.wake("a")
        world.envoy_is_away = True
        await asyncio.sleep(30)
        assert (world.triton.loaded, state(world)) == ({"a"}, "ready")
        with pytest.raises(EnvoyUnavailable):
            await world.residency.wake("b")
        assert (world.triton.loaded, state(world, "b")) == ({"a"}, "idle")
        world.envoy_is_away = False
        await world.call("a")
        await world.call("b")
        assert world.ended == {"fine": 2}
        await until(world, lambda: not world.triton.loaded)

    run(made(tmp_path, a=LAZY, b=LAZY), scenario)


def test_a_change_whose_caller_leaves_is_done_to_its_end(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.residency.load("a")
        for change in (world.residency.unload, world.residency.pin, world.residency.unload):
            asked = asyncio.create_task(change("a"))
            await asyncio.sleep(world.random.random() * 0.5)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        await asyncio.sleep(30)
        assert (state(world) != "idle") == ("a" in world.triton.loaded)
        await world.call("a")
        assert world.ended == {"fine": 1}

    for seed in SEEDS:
        run(made(tmp_path, seed=seed, a=KEPT), scenario)


def test_an_idle_model_that_is_taken_for_dead_is_not_loaded(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.residency.load("a")
        await world.residency.unload("a")
        world.triton.dead.add("a")
        assert world.catalogue.find_dead() == ["a"]
        assert not await world.catalogue.revive("a")
        assert (world.catalogue.find_dead(), world.triton.loaded, world.triton.loads) == ([], set(), {"a": 1})

    run(made(tmp_path, a=KEPT), scenario)


def test_a_call_that_comes_while_its_model_leaves_finds_its_place_free(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.residency.load("a")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.residency.unload("a"))
            await asyncio.sleep(world.random.random() * 0.3)
            async with world.residency.using("a"):
                assert world.triton.loaded == {"a"}

    for seed in SEEDS:
        run(made(tmp_path, ResidencySettings(max_loaded_models=1), seed=seed, a=KEPT), scenario)


def test_a_model_pinned_while_it_is_about_to_go_stays(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.residency.load("a")
        await asyncio.sleep(1 + world.random.random() * 0.8)
        await world.residency.pin("a")
        await asyncio.sleep(5)
        assert (state(world), world.residency.states()["a"].pinned) == ("ready", True)

    for seed in SEEDS:
        run(made(tmp_path, seed=seed, a=LAZY), scenario)


def test_a_model_that_could_not_be_pinned_is_not_pinned(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.triton.broken.add("a")
        pins = [asyncio.create_task(world.residency.pin("a")) for _ in range(3)]
        await asyncio.sleep(0)
        pins[0].cancel()
        cancelled, *failed = await asyncio.gather(*pins, return_exceptions=True)
        assert isinstance(cancelled, asyncio.CancelledError)
        assert [type(each) for each in failed] == [ModelLoadError] * 2
        await until(world, lambda: state(world) == "idle")
        assert not world.residency.states()["a"].pinned

    for seed in SEEDS:
        run(made(tmp_path, seed=seed, a=LAZY), scenario)


def test_calls_wait_for_an_unload_by_name_whatever_else_is_given_up(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.residency.load("a")
        began: list[str] = []

        async def call(name: str, over: asyncio.Event) -> None:
            async with world.residency.using("a"):
                began.append(name)
                await over.wait()

        first_over, second_over = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            # Its time is up, but a call comes at the last moment.
            while world.catalogue.served["a"].place is not Place.LEAVING:
                await asyncio.sleep(0.001)
            tasks.create_task(call("first", first_over))
            await asyncio.sleep(0)
            unloading = tasks.create_task(world.residency.unload("a"))
            await asyncio.sleep(2)
            tasks.create_task(call("second", second_over))
            await asyncio.sleep(2)
            assert (began, unloading.done()) == (["first"], False)
            first_over.set()
            await unloading
            second_over.set()
        assert (began, world.triton.loads) == (["first", "second"], {"a": 2})

    run(made(tmp_path, a=LAZY), patient(scenario, load_s=1))


def test_models_that_come_stay_within_the_bounds_too(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.residency.pin("a")
        await world.put("b", ModelOptions())
        assert (state(world, "b"), world.triton.loaded) == ("idle", {"a"})
        with pytest.raises(ResourceExhausted, match="all active models are busy"):
            await world.put("c", ModelOptions(pinned=True))
        await world.residency.unpin("a")
        await world.put("d", ModelOptions(pinned=True))
        assert world.triton.loaded == {"d"}

    run(made(tmp_path, ResidencySettings(max_loaded_models=1, min_residency_s=0), a=KEPT), scenario)


def test_a_model_that_comes_beside_a_first_call_does_not_pass_the_bound(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.call("a"))
            await asyncio.sleep(world.random.random() * 2)
            with suppress(ResourceExhausted):
                await world.put("b", ModelOptions())
        await many_calls(world)

    for seed in SEEDS:
        bound = ResidencySettings(max_loaded_models=1, min_residency_s=0)
        run(made(tmp_path, bound, seed=seed, a=KEPT), scenario)


def test_models_that_ask_for_nothing_are_loaded_at_the_start_and_stay(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await many_calls(world)
        await asyncio.sleep(3600)
        assert (world.ended, world.triton.loads, world.triton.loaded) == ({"fine": 40}, {"a": 1, "b": 1}, {"a", "b"})
        assert not any(map(world.residency.is_on_demand, "ab"))
        assert [each.cold_starts for each in world.residency.states().values()] == [0, 0]

    run(made(tmp_path, a=ModelOptions(), b=ModelOptions()), scenario)
