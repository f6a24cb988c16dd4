"""torch's recurrent layers as loops.

torch's own decomposition writes every step out: two sizes of a small LSTM over 7 steps take 29 s of CPU to export
instead of 10, over 100 steps minutes instead of 15 s.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from converters.exporters.torch_linear import product

Step = Callable[[Any, tuple[Any, ...], Sequence[Any]], tuple[Any, ...]]
"""From a row's input gates (bias included), its state and the layer's recurrent weights to its next state."""


def lowerings(torch: Any) -> dict[Any, Callable[..., Any]]:
    """By an operator of torch, its form in JAX; the operators are to be kept by ``run_decompositions``."""
    aten = torch.ops.aten
    return {
        aten.lstm.input: _lstm,
        aten.gru.input: _one_state(_gru_step),
        aten.rnn_tanh.input: _one_state(_rnn_step("tanh")),
        aten.rnn_relu.input: _one_state(_rnn_step("relu")),
    }


def _lstm(
    x: Any, states: Sequence[Any], weights: Sequence[Any], has_biases: bool, layers: int, _dropout: float, _train: bool,
    both_ways: bool, batch_first: bool,
) -> tuple[Any, ...]:  # fmt: skip
    return _layers(_lstm_step, x, states, weights, has_biases, layers, both_ways, batch_first)


def _one_state(step: Step) -> Callable[..., Any]:
    def lowered(
        x: Any, state: Any, weights: Sequence[Any], has_biases: bool, layers: int, _dropout: float, _train: bool,
        both_ways: bool, batch_first: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        return _layers(step, x, [state], weights, has_biases, layers, both_ways, batch_first)

    return lowered


def _layers(
    step: Step, x: Any, states: Sequence[Any], weights: Sequence[Any], has_biases: bool, layers: int, both_ways: bool,
    batch_first: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """All steps' outputs and the last states, as ``torch.nn.LSTM`` gives them.

    ``weights`` are by layer and direction: input, recurrent, two biases if it has them, projection if it has one.
    """
    jnp = importlib.import_module("jax.numpy")
    ways = 2 if both_ways else 1
    count = len(weights) // (layers * ways)
    steps = jnp.swapaxes(x, 0, 1) if batch_first else x
    last: list[tuple[Any, ...]] = []
    for layer in range(layers):
        found = []
        for way in range(ways):
            index = layer * ways + way
            own = list(weights[index * count : (index + 1) * count])
            start = tuple(state[index] for state in states)
            end, outputs = _scan(step, steps, start, own, has_biases, backward=way == 1)
            last.append(end)
            found.append(outputs)
        steps = jnp.concatenate(found, -1)
    outputs = jnp.swapaxes(steps, 0, 1) if batch_first else steps
    return outputs, *(jnp.stack(states) for states in zip(*last, strict=True))


def _scan(
    step: Step, steps: Any, start: tuple[Any, ...], weights: list[Any], has_biases: bool, *, backward: bool
) -> tuple[tuple[Any, ...], Any]:
    """The last state of one layer in one direction, and the first state after every step."""
    jax = importlib.import_module("jax")
    gates = product(steps, weights.pop(0))  # of all steps at once
    recurrent = [weights.pop(0)]
    if has_biases:
        gates = gates + weights.pop(0)
        recurrent.append(weights.pop(0))
    else:
        recurrent.append(jax.numpy.zeros(recurrent[0].shape[0], recurrent[0].dtype))

    def body(state: tuple[Any, ...], gate: Any) -> tuple[tuple[Any, ...], Any]:
        state = step(gate, state, [*recurrent, *weights])
        return state, state[0]

    end, outputs = jax.lax.scan(body, start, gates, reverse=backward)
    return end, outputs


def _split(gates: Any, count: int) -> Any:
    return importlib.import_module("jax.numpy").split(gates, count, -1)


def _lstm_step(gates: Any, state: tuple[Any, ...], weights: Sequence[Any]) -> tuple[Any, ...]:
    jax = importlib.import_module("jax")
    hidden, cell = state
    recurrent, bias, *projection = weights
    enter, forget, new, leave = _split(gates + product(hidden, recurrent) + bias, 4)
    cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(enter) * jax.numpy.tanh(new)
    hidden = jax.nn.sigmoid(leave) * jax.numpy.tanh(cell)
    return (product(hidden, projection[0]) if projection else hidden), cell


def _gru_step(gates: Any, state: tuple[Any, ...], weights: Sequence[Any]) -> tuple[Any, ...]:
    jax = importlib.import_module("jax")
    (hidden,) = state
    recurrent, bias = weights
    (reset, update, new), (r, u, n) = _split(gates, 3), _split(product(hidden, recurrent) + bias, 3)
    reset, update = jax.nn.sigmoid(reset + r), jax.nn.sigmoid(update + u)
    new = jax.numpy.tanh(new + reset * n)
    return (new + update * (hidden - new),)


def _rnn_step(function: str) -> Step:
    def step(gates: Any, state: tuple[Any, ...], weights: Sequence[Any]) -> tuple[Any, ...]:
        jax = importlib.import_module("jax")
        recurrent, bias = weights
        total = gates + state[0] @ recurrent.T + bias
        return (jax.nn.relu(total) if function == "relu" else jax.numpy.tanh(total),)

    return step
