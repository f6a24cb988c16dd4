"""The list of scenarios. Each is a function of the ground it gets; its docstring says what must hold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from ground import Ground, Terms

Body = Callable[[Ground], Awaitable[None]]
Prepare = Callable[[Path], None]


@dataclass(frozen=True)
class Scenario:
    """``body`` is tried against a server that stands on ``terms``, after ``prepare`` has worked on its folder."""

    body: Body
    terms: Terms
    prepare: Prepare

    @property
    def name(self) -> str:
        return self.body.__name__

    @property
    def must_hold(self) -> str:
        return " ".join((self.body.__doc__ or "").split())


SCENARIOS: dict[str, Scenario] = {}


def scenario(terms: Terms | None = None, prepare: Prepare = lambda _: None) -> Callable[[Body], Body]:
    def register(body: Body) -> Body:
        SCENARIOS[body.__name__] = Scenario(body, terms or Terms(), prepare)
        return body

    return register
