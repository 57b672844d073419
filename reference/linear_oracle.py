"""Linear attention in mpmath, at as many digits as one likes: each operator by its own definition, for small cases.

Nothing is shared with ``linear`` but the names of the arguments: a state is updated as the operator's paper writes it,
and gradients come from a tape of the operations (reverse-mode differentiation), not from a formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mpmath
from mpmath import mpf

DEFAULT_BITS = 400


class Node:
    """A number, and how it was made of others: a record for reverse-mode differentiation."""

    __slots__ = ("gradient", "parents", "value")

    def __init__(self, value: Any, parents: tuple[tuple[Node, Any], ...] = ()) -> None:
        self.value, self.parents, self.gradient = value, parents, mpf(0)

    def __add__(self, other: Node) -> Node:
        return Node(self.value + other.value, ((self, 1), (other, 1)))

    def __sub__(self, other: Node) -> Node:
        return Node(self.value - other.value, ((self, 1), (other, -1)))

    def __mul__(self, other: Node) -> Node:
        return Node(self.value * other.value, ((self, other.value), (other, self.value)))

    def __truediv__(self, other: Node) -> Node:
        value = self.value / other.value
        return Node(value, ((self, 1 / other.value), (other, -value / other.value)))

    def exp(self) -> Node:
        """e**x."""
        value = mpmath.exp(self.value)
        return Node(value, ((self, value),))

    def sqrt(self) -> Node:
        """Its root."""
        value = mpmath.sqrt(self.value)
        return Node(value, ((self, 1 / (2 * value)),))


Numbers = Sequence[Any]


def linear_oracle(
    operator: str,
    tensors: Mapping[str, Any],
    *,
    scale: float,
    head: int = 0,
    l2norm: bool = False,
    normalize: bool = False,
    do: Numbers | None = None,
    dfinal: Numbers | None = None,
    bits: int = DEFAULT_BITS,
) -> dict[str, Any]:
    """One head of one sequence.

    Args:
        operator: A name of ``linear.LINEAR_OPERATORS``.
        tensors: Its arguments by name as nested lists of floats: [T][D], [T] for one number a step, a float for one a
            head; ``initial_state`` [K][V].
        scale: Of o.
        head: Its number, of which retention makes its decay.
        l2norm: Whether q and k are normalised.
        normalize: Whether o is divided by scale q . sum k + 1e-10.
        do: dL/do, [T][V].
        dfinal: dL/d final_state, [K][V].
        bits: Of the working precision.

    Returns:
        ``o``, ``final_state`` and, with do or dfinal, the gradients by name (``dq``, …) as nested lists of mpf.
    """
    with mpmath.workprec(bits):
        leaves = {name: _leaves(value) for name, value in tensors.items()}
        outs, state = _run(operator, leaves, mpf(scale), head, l2norm=l2norm, normalize=normalize)
        found: dict[str, Any] = {"o": _values(outs), "final_state": _values(state)}
        if do is None and dfinal is None:
            return found
        _seed(outs, do)
        _seed(state, dfinal)
        _backward([outs, state])
        return found | {f"d{name}": _gradients(leaf) for name, leaf in leaves.items()}


def _run(
    operator: str, x: Mapping[str, Any], scale: Any, head: int, *, l2norm: bool, normalize: bool
) -> tuple[list[list[Node]], list[list[Node]]]:
    steps, keys, values = len(x["q"]), len(x["q"][0]), len(x["v"][0])
    state = x.get("initial_state") or [[Node(mpf(0)) for _ in range(values)] for _ in range(keys)]
    one, outs, total = Node(mpf(1)), [], [Node(mpf(0)) for _ in range(keys)]
    for t in range(steps):
        q, k, v = x["q"][t], x["k"][t], x["v"][t]
        if l2norm:
            q, k = _unit(q), _unit(k)
        decay = [one] * keys
        if operator == "mamba2":
            decay = [(x["dt"][t] * x["A"]).exp()] * keys
            k = [x["dt"][t] * e for e in k]
        elif "g" in x:
            g = x["g"][t]
            decay = [e.exp() for e in g] if isinstance(g, list) else [g.exp()] * keys
        elif "g_gamma" in x:
            decay = [x["g_gamma"].exp()] * keys
        elif operator == "retention":
            decay = [Node(1 - mpf(2) ** (-5 - head))] * keys
        decayed = [[d * e for e in row] for d, row in zip(decay, state, strict=True)]
        if "beta" in x:
            beta = x["beta"][t]
            new = [beta * (e - _dot(k, [row[j] for row in decayed])) for j, e in enumerate(v)]
            state = [[e + k[i] * n for e, n in zip(row, new, strict=True)] for i, row in enumerate(decayed)]
        else:
            low = None
            if "a" in x:
                low = [_dot(x["a"][t], [row[j] for row in state]) for j in range(values)]
            state = [[e + k[i] * n for e, n in zip(row, v, strict=True)] for i, row in enumerate(decayed)]
            if low is not None:
                state = [[e + x["b"][t][i] * n for e, n in zip(row, low, strict=True)] for i, row in enumerate(state)]
        out = [Node(scale) * _dot(q, [row[j] for row in state]) for j in range(values)]
        if normalize:
            total = [s + e for s, e in zip(total, k, strict=True)]
            under = Node(scale) * _dot(q, total) + Node(mpf(1e-10))
            out = [e / under for e in out]
        if "D" in x:
            out = [e + x["D"] * n for e, n in zip(out, v, strict=True)]
        outs.append(out)
    return outs, state


def _unit(x: list[Node]) -> list[Node]:
    root = (_dot(x, x) + Node(mpf(1e-6))).sqrt()
    return [e / root for e in x]


def _dot(x: list[Node], y: list[Node]) -> Node:
    total = x[0] * y[0]
    for a, b in zip(x[1:], y[1:], strict=True):
        total = total + a * b
    return total


def _leaves(value: Any) -> Any:
    return [_leaves(v) for v in value] if isinstance(value, list) else Node(mpf(value))


def _values(tree: Any) -> Any:
    return [_values(t) for t in tree] if isinstance(tree, list) else tree.value


def _gradients(tree: Any) -> Any:
    return [_gradients(t) for t in tree] if isinstance(tree, list) else tree.gradient


def _seed(tree: Any, seeds: Any) -> None:
    if seeds is None:
        return
    if isinstance(tree, list):
        for part, seed in zip(tree, seeds, strict=True):
            _seed(part, seed)
    else:
        tree.gradient += mpf(seeds)


def _backward(roots: Any) -> None:
    """Every node's gradient from its children's, in the reverse of the order in which they were made."""
    order: list[Node] = []
    seen: set[int] = set()
    stack: list[tuple[Any, bool]] = [(roots, False)]
    while stack:
        node, finished = stack.pop()
        if isinstance(node, list):
            stack += [(part, False) for part in node]
        elif finished:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack += [(parent, False) for parent, _ in node.parents]
    for node in reversed(order):
        for parent, slope in node.parents:
            parent.gradient += node.gradient * slope
