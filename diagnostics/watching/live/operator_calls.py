"""A forward and a backward of a fused operator: what it was given and returned, in our words and our layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Self

from torch import Tensor

from attn_diag.captures.sources import PACKING
from attn_diag.watching.live.gradients_to_come import GradientToCome
from attn_diag.watching.live.kernels import FusedOperator, refusal

# Arguments by name, or their defaults.
Arguments = Mapping[str, Any]


class OperatorCall:
    """One forward of a fused operator: the tensors are its own, as it was given and returned them, as [B, H, T, D].

    Args:
        operator: Which.
        arguments: Its arguments with their defaults.
        args: What it was given.
        kwargs: Likewise.
        result: What it returned.

    Attributes:
        operator: Which.
        lse: What it returned; None where it does not.
        module: The name of the module that makes the call, from the one that was compiled on; empty: not known.
        held: What it was given, held while it ran.
        record: What was recorded of the call, where its tensors are copies.
        to_come: The gradient at what made its q, where that is recorded too.
        sequences: So many sequences, the first, are all that anybody looks at; None: every one.
    """

    module = ""
    sequences: int | None = None
    held: Any = None
    record: object | None = None
    to_come: GradientToCome | None = None

    def __init__(
        self, operator: FusedOperator, arguments: Arguments, args: tuple[Any, ...], kwargs: Arguments, result: Any
    ) -> None:
        self.operator = operator
        results: Sequence[Any] = result if isinstance(result, (list, tuple)) else (result,)
        if operator.written:
            results = ({**arguments, **dict(zip(arguments, args, strict=False)), **kwargs}[operator.written],)
        if operator.returns is not None:
            results = operator.returns(results, kwargs)
        self._results = results
        self._o: Any = results[operator.o] if len(results) > operator.o else None
        lse = results[operator.lse] if len(results) > operator.lse else None
        # Transformer Engine's comes with others, which autograd keeps.
        lse = next(iter(lse), None) if isinstance(lse, (list, tuple)) else lse
        self.lse: Tensor | None = lse
        self._call = arguments, args, kwargs
        # Made when they are asked for, by hand: functools.cached_property takes a lock before Python 3.12.
        self._given: Mapping[str, Any] | None = None
        self._inputs: tuple[Tensor, Tensor, Tensor] | None = None
        self._laid_out_o: Tensor | None = None
        self._differentiable: bool | None = None

    @property
    def name(self) -> str:
        """The operator's, such as "aten::_scaled_dot_product_flash_attention"."""
        return self.operator.name

    @property
    def given(self) -> Mapping[str, Any]:
        """Its arguments by name, ours where we have one; tensors as it was given them."""
        if self._given is None:
            self._given = self.operator.given(*self._call)
        return self._given

    @property
    def is_cuda(self) -> bool:
        """Whether it ran on a GPU."""
        return bool(getattr(self._o, "is_cuda", False))

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        if self._inputs is None:
            lay_out, given = self.operator.laid_out, self.given
            self._inputs = (
                lay_out(given["q"], "q", given),
                lay_out(given["k"], "k", given),
                lay_out(given["v"], "v", given),
            )
        return self._inputs

    @property
    def o(self) -> Tensor:
        """What it returned."""
        if self._laid_out_o is None:
            self._laid_out_o = self.operator.laid_out(self._o, "o", self.given)
        return self._laid_out_o

    @property
    def differentiable(self) -> bool:
        """Whether it was given what autograd is to find a gradient of."""
        if self._differentiable is None:
            self._differentiable = any(t.requires_grad for t in self.inputs)
        return self._differentiable

    def kept(self) -> Tensor | None:
        """Which probabilities it kept of those sequences, bool [B, Hq, Tq, Tk]; None without dropout, or not known."""
        tells, given = self.operator.kept, self.given
        if tells is None or not self._results or not self.is_cuda or not 0 < (given.get("dropout_p") or 0) < 1:
            return None
        batch = len(given["q"])
        return tells(given, self._results, batch if self.sequences is None else min(batch, self.sequences))

    def recorded(self, record: object, *, differentiable: bool, to_come: GradientToCome | None) -> None:
        """Note that its tensors are copies, which nobody differentiates, of those of a call that is recorded."""
        self.record, self._differentiable, self.to_come = record, differentiable, to_come

    def given_instead(self, others: Mapping[int, Tensor]) -> Self:
        """The same call, with others in place of arguments, by their ``id``."""
        arguments, args, kwargs = self._call
        found = copy(self)
        found._call = (
            arguments,
            tuple(others.get(id(x), x) for x in args),
            {name: others.get(id(x), x) for name, x in kwargs.items()},
        )
        found._given = found._inputs = found._laid_out_o = None
        return found

    def of_others(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor | None) -> Self:
        """The same call with other tensors, [B, H, T, D] and [B, H, T], in place of its own."""
        found = copy(self)
        found._inputs, found._laid_out_o, found.lse = (q, k, v), o, lse
        return found

    def copied(self, copy_of: Callable[[Tensor], Tensor], copy_whole: Callable[[Tensor], Tensor]) -> OperatorCall:
        """The same call, holding copies instead of any tensor of its own.

        Args:
            copy_of: Copies of a tensor [B, H, …] what is wanted of it.
            copy_whole: Copies a tensor whose axes mean something else.
        """
        lse, mask = self.lse, self.given.get("mask")
        others = [copy_of(t) for t in (*self.inputs, self.o)]
        found = self.of_others(others[0], others[1], others[2], others[3], None if lse is None else copy_of(lse))
        plain = {name: x for name, x in self.given.items() if isinstance(x, (bool, int, float, str, type(None)))}
        borders = {name: copy_whole(self.given[name]) for name in PACKING if self.given.get("packed")}
        whole = {name: self.given.get(name) for name in ("sinks", "alibi_slopes")}
        found._given = plain | borders | {name: None if t is None else copy_whole(t) for name, t in whole.items()}
        found._given |= {"mask": None if mask is None else copy_of(mask), "refused": refusal(self.given)}
        found._o, found._call, found._differentiable = found.o, ({}, (), {}), self.differentiable
        found._results = ()
        return found

    def fused(self, d: int, dv: int, rows: int) -> dict[str, Any]:
        """The kernel's name, q, k, v, o and LSE by the names of ``AttentionCall``.

        Args:
            d: q's features without padding.
            dv: v's.
            rows: Query rows, without what pads the LSE.
        """
        q, k, v = self.inputs
        lse = self.lse
        if lse is not None:
            lse = lse.transpose(0, 1).flatten(1)[None] if self.given.get("rows_apart") and lse.dim() == 3 else lse
            lse = lse.squeeze(-1) if lse.dim() == 4 else lse[None] if lse.dim() == 2 else lse
            lse = cut(lse, rows) if lse.numel() else None
            # Some have packed documents one below the other, padded to the longest.
            lse = None if lse is not None and self.given.get("packed") and lse.shape[0] > 1 else lse
        tensors = {"q": cut(q, d), "k": cut(k, d), "v": cut(v, dv), "o": cut(self.o, dv), "lse": lse}
        return {"kernel": self.kernel, **tensors}

    def fields(self) -> dict[str, Any]:
        """Everything an ``AttentionCall`` holds, where nothing but the operator is known."""
        q, _, v = self.inputs
        given = self.given
        causal = given.get("is_causal") or "none"
        left, right = (-1 if end is None or end < 0 else end for end in (given.get("left"), given.get("right")))
        kept = self.kept()
        dropout = {} if kept is None else {"dropout_mask": kept, "dropout_p": given["dropout_p"]}
        return self.fused(q.shape[-1], v.shape[-1], q.shape[-2]) | {
            "mask": given.get("mask"),
            "causal": self.operator.causal if causal is True else causal,
            "window": None if left < 0 and right < 0 else (left, right),
            "scale": given.get("scale"),
            "softcap": given.get("softcap") or None,
            "sinks": given.get("sinks"),
            "alibi_slopes": self._slopes(q),
            "alibi_origin": given.get("alibi_origin", "row"),
            "refused": refusal({**given, "dropout_p": None} if dropout else given),
            **{name: given[name] for name in PACKING if given.get("packed")},
            **dropout,
        }

    def _slopes(self, q: Tensor) -> Tensor | None:
        """ALiBi's, of those sequences that are kept."""
        slopes: Tensor | None = self.given.get("alibi_slopes")
        return slopes if slopes is None or slopes.dim() == 1 or self.given.get("packed") else slopes[: len(q)]

    @property
    def kernel(self) -> str:
        """What reports call it, and who stands in for it."""
        if "recipe" in self.given:
            forward, backward = (json.loads(self.given[n])["name"] for n in ("recipe", "backward_recipe"))
            return f"{self.operator.kernel}, {forward} forward, {backward} backward"
        if "flash_attention" in self.operator.name and self.is_cuda and (other := _flash_implementation()):
            return f"{self.operator.kernel} ({other})"
        return self.operator.kernel


class OperatorBackward:
    """One backward of a fused operator.

    Args:
        operator: Whose.
        arguments: The backward's arguments with their defaults.
        args: What it was given.
        kwargs: Likewise.
        result: What it returned.

    Attributes:
        forward: What was recorded of the forward, where that is known.
        hops: Of a ring's, those of its hops.
        notes: What is to be said of the call.
    """

    forward: object | None = None
    hops: Sequence[OperatorBackward] = ()
    notes: Sequence[str] = ()

    def __init__(
        self, operator: FusedOperator, arguments: Arguments, args: tuple[Any, ...], kwargs: Arguments, result: Any
    ) -> None:
        self._operator, self._call, self._result = operator, (arguments, args, kwargs), result
        self._named: Mapping[str, Any] | None = None
        self._known: dict[str, Any] = {}

    @classmethod
    def known(
        cls, o: Tensor, lse: Tensor | None, do: Tensor, gradients: Sequence[Tensor | None], *, of_lse: bool = False
    ) -> Self:
        """One of these tensors, [B, H, T, D] and [B, H, T]."""
        found = cls.__new__(cls)
        found._known = {"o": o, "lse": lse, "do": do, "gradients": list(gradients), "of_lse": of_lse}
        return found

    def copied(self, copy_of: Callable[[Tensor], Tensor], o: Tensor, lse: Tensor | None) -> OperatorBackward:
        """The same backward, of a forward that returned ``o`` and ``lse``, holding copies of its other tensors."""
        gradients = [None if t is None else copy_of(t) for t in self.gradients]
        return self.known(o, lse, copy_of(self.do), gradients, of_lse=self.of_lse)

    @property
    def is_cuda(self) -> bool:
        """Whether it ran on a GPU."""
        # Asked of every backward, whether or not anybody waits for it.
        given = (
            self._known.get("do") if self._known else next((t for t in self._call[1] if isinstance(t, Tensor)), None)
        )
        return self.do.is_cuda if given is None else bool(given.is_cuda)

    @property
    def gradients(self) -> list[Tensor | None]:
        """dq, dk and dv."""
        if "gradients" not in self._known:
            names, given, result = ("dq", "dk", "dv"), self._given, self._result
            # Some write them into tensors that they are given.
            written = [given.get(name) for name in names]
            returned = [result[n] if n < len(result) else None for n in self._operator.gradients]
            grads = returned if all(grad is None for grad in written) else written
            laid_out = [None if t is None else self._laid_out(name, t) for name, t in zip(names, grads, strict=True)]
            self._known["gradients"] = laid_out
        return self._known["gradients"]  # type: ignore[no-any-return]

    @property
    def o(self) -> Tensor:
        """What the forward returned, as it was given it."""
        return self._tensor("o")

    @property
    def lse(self) -> Tensor | None:
        """Likewise; None where it is given none."""
        if "lse" not in self._known:
            self._known["lse"] = self._given.get("lse")
        return self._known["lse"]  # type: ignore[no-any-return]

    @property
    def do(self) -> Tensor:
        """The gradient of o."""
        return self._tensor("do")

    def given_do(self, do: Tensor) -> None:
        """Say what the gradient of o was, laid out as it came, where it is another now."""
        self._known["do"] = self._laid_out("do", do)

    @property
    def of_lse(self) -> bool:
        """Whether the LSE has a gradient too, so that dq and dk are not those of o alone."""
        if "of_lse" not in self._known:
            self._known["of_lse"] = self._given.get("dlse") is not None
        return bool(self._known["of_lse"])

    @property
    def _given(self) -> Mapping[str, Any]:
        if self._named is None:
            self._named = self._operator.given(*self._call)
        return self._named

    def _tensor(self, name: str) -> Tensor:
        if name not in self._known:
            self._known[name] = self._laid_out(name, self._given[name])
        return self._known[name]  # type: ignore[no-any-return]

    def _laid_out(self, name: str, tensor: Tensor) -> Tensor:
        return self._operator.laid_out(tensor, name, self._given)


def cut(t: Tensor, size: int) -> Tensor:
    """So much of the last axis; a tensor without more is itself."""
    return t if t.shape[-1] == size else t[..., :size]


def _flash_implementation() -> str | None:
    """Who stands in for torch's flash attention (``activate_flash_attention_impl``)."""
    from torch.nn import attention

    current = getattr(attention, "current_flash_attention_impl", None)
    return None if current is None else current()
