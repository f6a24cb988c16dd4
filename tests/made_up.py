"""Values that property tests make up: valid documents with one part replaced, and text with one part damaged."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

# A few hundred in the suite; `make thorough` asks for its profile's 10,000.
MANY = settings(max_examples=max(300, settings().max_examples), deadline=None)

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["f32", "cpu"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside nested lists and objects."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, inner in items for deeper in places(inner, (*path, key)))]


@st.composite
def altered(draw: st.DrawFn, value: Any, times: int = 1) -> Any:
    """``value`` with parts of it replaced, removed or exchanged for another part of it."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, times))):
        if len(found := places(value)) == 1:
            break
        *outer, key = draw(st.sampled_from(found[1:]))
        target = value
        for step in outer:
            target = target[step]
        match draw(st.sampled_from(["replace", "move", "remove"])):
            case "replace":
                target[key] = draw(anything)
            case "move":
                source = value
                for step in draw(st.sampled_from(found)):
                    source = source[step]
                target[key] = copy.deepcopy(source)
            case "remove":
                del target[key]
    return value


@st.composite
def damaged(draw: st.DrawFn, text: str, words: list[str]) -> str:
    """``text`` with up to three stretches replaced by ``words``, other stretches of it or any text."""
    for _ in range(draw(st.integers(0, 3))):
        start, stop, other, end = (draw(st.integers(0, len(text))) for _ in range(4))
        piece = draw(st.sampled_from(words) | st.text(max_size=6) | st.just(text[other:end]))
        text = text[:start] + piece + text[max(start, min(stop, start + 12)) :]
    return text
