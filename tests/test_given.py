"""What functions about heads take: any library's tensors, a capture, a file, a folder, a list; and their answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from builders import rounded_inputs, some
from torch import Tensor

import attn_diag
from attn_diag.captures.tensors import as_tensor
from attn_diag.reports.opening import next_command
from attn_diag.results.several import Several

GIVEN: dict[str, Any] = {**rounded_inputs(rows=20)}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attribute": attn_diag.attribute,
    "identify": attn_diag.identify,
    "what_if": lambda *a, **k: attn_diag.what_if(*a, only=["stochastic-o"], **k),
    "microscope": attn_diag.microscope,
}


def capture() -> attn_diag.Capture:
    return attn_diag.Capture.from_tensors(GIVEN, causal="top-left")


def as_numpy(tensor: Tensor) -> Any:
    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tensors_a_capture_a_file_a_folder_and_a_list(name: str, tmp_path: Path) -> None:
    function = FUNCTIONS[name]
    (tmp_path / "folder").mkdir()
    file = capture().save(tmp_path / "folder" / "a.safetensors")
    expected = function(capture(), device="cpu")
    q, k, v, rest = GIVEN["q"], GIVEN["k"], GIVEN["v"], {n: GIVEN[n] for n in ("o", "do")}
    assert function(q, k, v, **rest, causal=True, device="cpu") == expected
    heads = len(expected.heads)
    assert [row["observation"] for row in expected.to_rows()][:heads] == ["observed"] * heads
    assert expected.findings
    assert expected.to_dict()["source"] == "memory"
    for path in (str(file), file):
        one = function(path, device="cpu")
        assert type(one) is type(expected)
        assert one.source == str(file)
    listed: list[tuple[Any, int]] = [(file.parent, 1), ([capture(), str(file)], 2), ((file, file, file), 3)]
    for source, count in listed:
        several = function(source, device="cpu")
        assert isinstance(several, Several)
        assert (len(several), len(several.heads)) == (count, heads * count)
        assert several.findings == tuple(f for one in several for f in one.findings)
        assert several[-1].source in several.report()
        assert len(several.to_rows()) == heads * count
        assert len(several[:1].to_dict()["results"]) == 1
        assert repr(several).startswith(f"<{count} {type(expected).__name__}")


def test_inspect_takes_them_too(tmp_path: Path) -> None:
    file = capture().save(tmp_path / "a.safetensors")
    capture().save(tmp_path / "b.safetensors")
    assert len(attn_diag.inspect(tmp_path, device="cpu").heads) == 4
    found = attn_diag.inspect([file, capture()], device="cpu")
    assert [c.source for c in found.captures] == [str(file), "memory"]
    assert attn_diag.inspect(file, causal=False, device="cpu").captures[0].metadata["causal"] == "none"
    assert len(found.to_rows()) == 4
    assert found.to_rows()[0]["source"] == str(file)


def test_data_frames() -> None:
    pytest.importorskip("pandas")
    found = attn_diag.inspect(capture(), device="cpu")
    frame = found.to_dataframe()
    assert frame["head"].tolist() == [0, 1]
    assert frame["quantities.o.factor"].tolist() == [head.quantities[0].factor for head in found.heads]
    both = attn_diag.microscope([capture(), capture()], device="cpu")
    assert isinstance(both, Several)
    assert both.to_dataframe()["row"].tolist() == [one.row for one in both]


def test_numpy_and_jax_arrays_are_taken_bit_for_bit() -> None:
    expected = attn_diag.inspect(**GIVEN, causal=True, device="cpu")
    arrays = {name: as_numpy(t) for name, t in GIVEN.items()}
    assert attn_diag.inspect(**arrays, causal=True, device="cpu") == expected
    for tensor in (GIVEN["q"].half(), GIVEN["q"].double(), torch.arange(6).view(2, 3), torch.tensor([True, False])):
        assert torch.equal(as_tensor("q", tensor.numpy()), tensor)
    swapped = np.arange(6, dtype=">f4").reshape(2, 3)[:, ::-1]
    assert as_tensor("q", swapped).tolist() == swapped.tolist()
    e4m3 = GIVEN["q"].to(torch.float8_e4m3fn)
    assert torch.equal(
        as_tensor("q", e4m3.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)).view(torch.uint8),
        e4m3.view(torch.uint8),
    )


def test_jax_itself() -> None:
    jax = pytest.importorskip("jax")
    expected = attn_diag.inspect(**GIVEN, causal=True, device="cpu")
    arrays = {name: jax.numpy.asarray(as_numpy(t)) for name, t in GIVEN.items()}
    assert attn_diag.inspect(**arrays, causal=True, device="cpu") == expected
    with pytest.raises(attn_diag.InputError, match=r"^q is a JAX array without values here .* outside jax\.jit"):
        jax.jit(lambda q: attn_diag.inspect(q, GIVEN["k"], GIVEN["v"]) and q)(arrays["q"])


class Shared:
    """Another library's array, which shares its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), "their bfloat16"

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


class Closed:
    """One that does not."""

    shape, dtype = (1, 2, 3, 4), "float"


def test_other_libraries() -> None:
    assert torch.equal(as_tensor("q", Shared(GIVEN["q"])), GIVEN["q"])
    with pytest.raises(attn_diag.InputError, match=r"q must be a tensor of torch, NumPy or JAX, got .*Closed; "):
        attn_diag.inspect(Closed(), GIVEN["k"], GIVEN["v"])


q, k, v, o = (GIVEN[name] for name in ("q", "k", "v", "o"))
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no k": (
        lambda: attn_diag.attribute(q),
        "attribute() needs k beside q: attribute(q, k, v, o=…), each",
    ),
    "a list": (lambda: attn_diag.inspect(q, k.tolist(), v), "k must be a tensor of torch, NumPy or JAX, got list"),
    "texts": (lambda: attn_diag.inspect(np.array(["a"]), k, v), "q is an array of str32, which torch has not"),
    "tensors in a list": (
        lambda: attn_diag.attribute([q, k]),
        "got one of torch.Tensor; tensors are given as attribute(q, k, v, o=…)",
    ),
    "an empty list": (lambda: attn_diag.identify([]), "identify() was given no capture: an empty list"),
    "a dict": (
        lambda: attn_diag.inspect({"q": q}),  # type: ignore[arg-type]
        "a capture's file, a folder of them, or a list of these; got dict",
    ),
    "a number": (lambda: attn_diag.what_if(3), "or a list of these; got int"),  # type: ignore[call-overload]
    "no file": (lambda: attn_diag.microscope("nowhere.safetensors"), "nowhere.safetensors: no such file"),
    "tensors beside a capture": (
        lambda: attn_diag.attribute(capture(), o=o),
        "attribute() was given o beside a capture, which brings its own tensors",
    ),
    "a misspelt tensor": (
        lambda: attn_diag.what_if(q, k, v, doo=o),  # type: ignore[call-overload]
        "what_if() has no argument 'doo'; of a call it takes o, lse,",
    ),
    "a row in k's place": (
        lambda: attn_diag.microscope(capture(), 7),  # type: ignore[call-overload]
        "microscope() takes q, k and v, or a capture and options by name: microscope(capture, row=7, …)",
    ),
    "an observation in k's place": (
        lambda: attn_diag.identify(capture(), "flash"),  # type: ignore[call-overload]
        "identify(capture, observation='flash', …)",
    ),
    "an ambiguous mask": (lambda: attn_diag.attribute(q[:, :, :5], k, v, causal=True), "causal=True is ambiguous"),
    "another layout": (
        lambda: attn_diag.inspect(
            q.transpose(1, 2).repeat(1, 1, 2, 1), k.transpose(1, 2), v.transpose(1, 2), causal=True
        ),
        "of [B, T, H, D] say layout='BTHD'",
    ),
    "no batch axis": (lambda: attn_diag.inspect(q[0], k[0], v[0], causal=True), "of one sequence q[None]"),
    "one head": (lambda: attn_diag.inspect(q[0, 0], k[0, 0], v[0, 0], causal=True), "of one head q[None, None]"),
    "a window of keys": (
        lambda: attn_diag.inspect(q, k, v, o=o, window=8, causal=True),  # type: ignore[arg-type]
        "window must be (left, right), got 8: 8 keys, a row's own among them, are (7, 0) under a causal mask",
    ),
    "a mask of integers": (
        lambda: attn_diag.inspect(q, k, v, o=o, mask=torch.ones(20, 20).long()),
        "mask has dtype int64; expected bool (True: attend) or, to be added, floating point",
    ),
    "a mask of keys": (
        lambda: attn_diag.inspect(*(t.repeat(2, 1, 1, 1) for t in (q, k, v)), mask=torch.ones(2, 20).bool()),
        "; of [B, Tk] give mask[:, None, None]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_by_name(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(attn_diag.InputError) as refused:
        call()
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ["inspect", "identify", "attribute", "replay"])
@pytest.mark.parametrize("wrong", [".", Path(), ["a.safetensors"], None], ids=repr)
def test_functions_of_captures_say_that_they_take_captures_alone(name: str, wrong: Any) -> None:
    with pytest.raises(attn_diag.InputError, match=rf"{name}_captures\(\) takes captures.*; {name}\(\) takes files"):
        getattr(attn_diag, f"{name}_captures")(wrong)


def test_where_o_is_missing_it_is_asked_for() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 1, 40, 16, generator=generator).bfloat16() for _ in range(4))
    x, y, z, dy = (t.double() for t in (q, k, v, do))
    probs = (x @ y.mT / 4).softmax(-1)
    ds = probs * (dy @ z.mT - (dy * (probs @ z)).sum(-1, keepdim=True)) / 4
    found = attn_diag.inspect(q, k, v, do=do, dq=(ds @ y).bfloat16(), dk=(ds.mT @ x).bfloat16(), device="cpu")
    (verdict,) = {h.verdict for h in found.captures[0].observations[0].heads if h.head is not None}
    assert some(verdict).labels == ("undecided",)
    assert some(verdict).suggestions[0].startswith("Capture O too")
    assert next_command(found).said.startswith("capture o of these heads too")
