"""Dumps made by torch.save become captures that hold what was computed; and what holds for dumps of every tool."""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import Explosive, holds
from command_line import Run
from foreign_dumps import (
    QKVO,
    SglangDumper,
    attention,
    converted,
    flashinfer_dump,
    inner,
    inputs,
    named,
    only,
    refused,
    single_prefill,
    tokens_first,
)
from torch import Tensor

from attn_diag import InputError, convert, load
from attn_diag.captures.dumps.names import Leaf, choose, parse_map, role_of

pytestmark = pytest.mark.slow


def layer_tensors(layers: int = 3) -> list[tuple[Tensor, ...]]:
    """(q, k, v, o) of several layers, causal, each of its own length."""
    found: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        q, k, v = inputs(rows=12 + 2 * layer, keys=12 + 2 * layer)
        found.append((q, k, v, attention(q, k, v, "top-left")[0]))
    return found


def hugging_face(tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    """Hugging Face's names; attn_output is [B, T, H, D] there, the others [B, H, T, D]."""
    return named(
        (*tensors[:3], tensors[3].transpose(1, 2)), "query_states", "key_states", "value_states", "attn_output"
    )


def flat(layers: list[tuple[Tensor, ...]], key: str) -> dict[str, Tensor]:
    """One dict for all layers; ``key`` with the places {n} and {i} for the name and the layer."""
    return {key.format(n=n, i=i): x for i, t in enumerate(layers) for n, x in zip(QKVO, t, strict=True)}


NESTINGS: dict[str, Callable[[list[tuple[Tensor, ...]]], Any]] = {
    "list-of-dicts": lambda layers: [named(t, *QKVO) for t in layers],
    "list-of-tuples": lambda layers: [tuple(t) for t in layers],
    "dict-of-lists": lambda layers: {n: [t[i] for t in layers] for i, n in enumerate(QKVO)},
    "numbered-dicts": lambda layers: {i: named(t, "query", "key", "value", "out") for i, t in enumerate(layers)},
    "named-dicts": lambda layers: {f"layer_{i}": hugging_face(t) for i, t in enumerate(layers)},
    "dotted": lambda layers: flat(layers, "layers.{i}.attn.{n}"),
    "suffixed": lambda layers: flat(layers, "{n}_{i}"),
    "prefixed": lambda layers: {
        k.replace("_o", "_attn_out"): t for k, t in flat(layers, "layer{i}_{n}").items()
    },
    "inputs-outputs": lambda layers: {
        "model": [{"inputs": named(t[:3], "q", "k", "v"), "outputs": {"attn_output": t[3]}} for t in layers]
    },
}  # fmt: skip


@pytest.mark.parametrize("nest", NESTINGS.values(), ids=NESTINGS)
def test_torch_dumps_of_several_layers(tmp_path: Path, nest: Callable[..., Any]) -> None:
    layers = layer_tensors()
    torch.save(nest(layers), tmp_path / "dump.pt")
    captures = [load(path) for path in convert(tmp_path / "dump.pt", tmp_path / "c")]
    assert [c.metadata.layer for c in captures] == [0, 1, 2]
    for capture, tensors in zip(captures, layers, strict=True):
        for name, tensor in zip(QKVO, tensors, strict=True):
            assert torch.equal(inner(capture, name), tensor), name
        assert (capture.metadata.causal, capture.metadata.layout, holds(capture)) == ("top-left", "BHTD", True)


def test_torch_dicts_told_apart_by_their_own_names(tmp_path: Path) -> None:
    first, second = (named(t, *QKVO) for t in layer_tensors(2))
    torch.save({"encoder": first, "decoder": second}, tmp_path / "dump.pth")
    written = convert(tmp_path / "dump.pth", tmp_path / "c")
    assert [path.name for path in written] == ["dump_encoder.safetensors", "dump_decoder.safetensors"]


def test_torch_metadata_of_each_call(tmp_path: Path) -> None:
    """What a dict states is of the calls below it; what lies beside them is of all."""
    first, second = (named(t[:3], "q", "k", "v") for t in layer_tensors(2))
    content = {
        "encoder": {**first, "causal": False},
        "decoder": {**second, "is_causal": torch.tensor(True), "sm_scale": torch.tensor(0.5)},
        "config": {"softcap": 30.0, "window_size": torch.tensor([4, 0])},
    }
    torch.save(content, tmp_path / "dump.pt")
    encoder, decoder = (load(path).metadata for path in convert(tmp_path / "dump.pt", tmp_path / "c"))
    assert (encoder.causal, encoder.scale, encoder.softcap, encoder.window) == ("none", None, 30.0, (4, 0))
    assert (decoder.causal, decoder.scale, decoder.softcap, decoder.window) == ("top-left", 0.5, 30.0, (4, 0))


@pytest.mark.parametrize("layout", ["BHTD", "BTHD"])
@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
def test_torch_layout_and_alignment_are_found_by_what_fits(
    tmp_path: Path, layout: str, causal: str, batched: bool
) -> None:
    # Equal numbers of heads and square: shapes tell nothing. Rows and keys differ, so that alignments do.
    q, k, v = inputs(heads=12, kv_heads=12, rows=12, keys=12 if causal != "bottom-right" else 18)
    o, lse = attention(q, k, v, causal, scale=0.2)
    tensors = [t if layout == "BHTD" else t.transpose(1, 2).contiguous() for t in (q, k, v, o)]
    tensors = tensors if batched else [t[0] for t in tensors]
    content = {**named(tuple(tensors), *QKVO), "softmax_lse": lse if batched else lse[0], "softmax_scale": 0.2}
    capture = converted(tmp_path, content)
    m = capture.metadata
    assert (m.layout, m.causal, m.lse_base, m.scale) == (layout, causal, "e", 0.2)
    assert "O agrees within" in str(m.notes)
    assert holds(capture) is True
    # What the user says counts, fitting or not, and the notes say that it does not.
    other = "none" if causal != "none" else "top-left"
    forced = converted(tmp_path, content, causal=other, layout=layout)
    assert (forced.metadata.causal, holds(forced)) == (other, False)
    assert "O does not agree with attention on q, k and v" in str(forced.metadata.notes)


@pytest.mark.parametrize("shape", ["BTH", "HT", "TH", "BHT1", "(BH)T"])
@pytest.mark.parametrize("base", ["e", "2"])
def test_torch_lse_of_other_shapes_and_bases(tmp_path: Path, shape: str, base: str) -> None:
    q, k, v = inputs()
    o, lse = attention(q, k, v, "top-left")
    dumped = lse if base == "e" else lse / math.log(2)
    forms = {"BTH": dumped.mT, "HT": dumped[0], "TH": dumped[0].T, "BHT1": dumped[..., None], "(BH)T": dumped[0]}
    content = {**named((q, k, v, o), *QKVO), "logsumexp": forms[shape]}
    capture = converted(tmp_path, content)
    assert torch.equal(capture.tensors["lse"][...], dumped)
    assert (capture.metadata.lse_base, holds(capture)) == (base, True)
    assert holds(converted(tmp_path, content, lse_base={"e": "2", "2": "e"}[base])) is False


def test_torch_heads_and_features_in_one_axis(tmp_path: Path) -> None:
    q, k, v = inputs(batch=2)
    o, _ = attention(q, k, v, "top-left")
    together = tuple(t.transpose(1, 2).flatten(2) for t in (q, k, v, o))
    capture = converted(tmp_path, named(together, *QKVO), head_dim=16)
    assert all(torch.equal(inner(capture, n), t) for n, t in zip(QKVO, (q, k, v, o), strict=True))
    assert holds(capture) is True
    refused(tmp_path / "dump.pt", "which heads of 7 do not divide; correct --head-dim", head_dim=7, layout="BTHD")


def test_torch_gradients_and_metadata(tmp_path: Path) -> None:
    q, k, v = inputs()
    o, _ = attention(q, k, v, "top-left")
    content = {
        **named((q, k, v, o), *QKVO), "grad_out": o, "d_q": q * 2, "k_grad": k * 3, "grad_v": v * 4,
        "is_causal": True, "layer_idx": 7, "step": 500, "window_size": (-1, -1), "dropout_p": 0.0,
    }  # fmt: skip
    capture = converted(tmp_path, content)
    for name, tensor in {"do": o, "dq": q * 2, "dk": k * 3, "dv": v * 4}.items():
        assert torch.equal(capture.tensors[name][...], tensor), name
    m = capture.metadata
    assert (m.causal, m.layer, m.step, m.window) == ("top-left", 7, 500, None)
    assert converted(tmp_path, {**content, "sliding_window": 4}, window=(5, 0)).metadata.window == (5, 0)


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 12, 24])}, "packed (varlen) sequences are not supported"),
        ({"qo_indptr": torch.tensor([0, 12])}, "packed (varlen) sequences are not supported"),
        ({"block_table": torch.zeros(2, 2)}, "a paged KV cache is not supported"),
        ({"dropout_p": 0.1}, "'dropout_p': expected which probabilities were kept"),
        ({"alibi_slopes": torch.ones(3)}, "alibi_slopes must have shape [4]"),
        ({"alibi": torch.ones(4)}, "expected ALiBi's slopes as a tensor 'alibi_slopes'"),
        ({"o": torch.zeros(1, 4, 9, 16)}, "o must have shape [1, 4, 24, 16]"),
        ({"lse": torch.zeros(3, 3)}, "lse must have shape [B, H, T] = [1, 4, 24], got [3, 3]"),
        ({"causal": "sometimes"}, "causal must be true, false or one of none"),
        ({"scale": "big"}, "scale='big' cannot be read as a number"),
        ({"cfg": {"scale": torch.empty(0)}}, "cfg.scale=tensor [0] float32 cannot be read as a number"),
        ({"scale": math.inf}, "scale must be a finite number other than 0"),
        ({"softcap": [1, 2]}, "softcap=[1, 2] cannot be read as a number"),
        ({"window": (math.inf, -1)}, "window=(inf, -1) cannot be read as one or two integers"),
        ({"window": (4.5, -1)}, "window=(4.5, -1) cannot be read as one or two integers"),
        ({"window": "wide"}, "window='wide' cannot be read as one or two integers"),
        ({"layer": 2.5}, "layer=2.5 cannot be read as an integer"),
        ({"layer": "7" * 5000}, f"layer='{'7' * 79}… cannot be read as an integer"),
        ({"q": torch.ones(2, 2).to_sparse()}, "q is sparse, nested or without data"),
    ],
)
def test_torch_dumps_that_are_refused(tmp_path: Path, extra: dict[str, Any], why: str) -> None:
    content = named(inputs(), "q", "k", "v")
    assert converted(tmp_path, content)
    torch.save({**content, **extra}, tmp_path / "dump.pt")
    refused(tmp_path / "dump.pt", why)
    refused(tmp_path / "dump.pt", str(tmp_path / "dump.pt"))


def cyclic() -> list[Any]:
    found: list[Any] = []
    found.append({"x": found})
    return found


@functools.cache
def odd_values() -> dict[str, Any]:
    """What may stand where a tensor, or what a call is told by, should be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of nested, quantized and sparse tensors
        return {
            "empty": torch.empty(0),
            "no rows": torch.empty(1, 4, 0, 16).bfloat16(),
            "no axes": torch.tensor(1.0),
            "five axes": torch.ones(1, 1, 4, 24, 16),
            "sparse": torch.eye(4).to_sparse(),
            "csr": torch.eye(4).to_sparse_csr(),
            "meta": torch.empty(1, 4, 24, 16, device="meta"),
            "complex": torch.ones(1, 4, 24, 16, dtype=torch.complex64),
            "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
            "bool": torch.ones(1, 4, 24, 16) > 0,
            "nested": torch.nested.nested_tensor([torch.ones(3), torch.ones(5)]),
            "uint16": torch.ones(24).to(torch.uint16),
            "complex half": torch.ones(24).to(torch.complex32),
            "bits": torch.ones(24).to(torch.uint8).view(torch.bits8),
            "fp4": torch.ones(24).to(torch.uint8).view(torch.float4_e2m1fn_x2),
            "other shape": torch.ones(1, 3, 23, 15),
            "repeated": torch.ones(1).bfloat16().expand(1, 4, 24, 16),
            "bomb": torch.ones(1).expand(1, 4, 2**34, 16),
            "parameter": torch.nn.Parameter(torch.ones(1, 4, 24, 16)),
            "NaN": torch.full((1, 4, 24, 16), math.nan),
            "None": None,
            "text": "q",
            "escape": "\x1b[31m\n::error ::x",
            "half a pair": "\ud800",
            "number": 0.5,
            "huge": 10**400,
            "infinite": math.inf,
            "not a number": math.nan,
            "list": [1, 2],
            "dict": {"a": 1},
            "cyclic": cyclic(),
            "cyclic dict": {"a": cyclic()},
            "set": {1},
            "bytes": b"q",
            "dtype": torch.float32,
        }


PLACES = {
    "torch": ("q", "o", "scale", "window", "is_causal", "layer", "notes", "metadata"),
    "sglang": ("q", "attn_output", "positions", "seq_lens", "meta", "world_size"),
    "flashinfer": ("arg_0", "result", "result_1", "kwarg_custom_mask", "kwarg_sm_scale", "kwarg_window_left"),
}


def faulty(folder: Path, kind: str, place: str, value: Any) -> Path:
    """A dump that holds ``value`` in that place."""
    (folder / "d").mkdir(parents=True)
    q, k, v = inputs()
    o, _ = attention(q, k, v)
    first = tokens_first(q, k, v, o)
    if kind == "torch":
        torch.save({**named((q, k, v, o), *QKVO), place: value}, folder / "d" / "dump.pt")
    elif kind == "sglang":
        tensors: dict[str, Any] = named(first, "q", "k", "v", "attn_output")
        meta = value if place == "meta" else {"world_size": value if place == "world_size" else 2}
        tensors |= {place: value} if place not in ("meta", "world_size") else {}
        for number, (name, held) in enumerate(tensors.items()):
            path = folder / "d" / f"step=0___rank=0___dump_index={number}___name={name}___layer_id=2.pt"
            torch.save({"value": held, "meta": meta}, path)
    else:
        made = flashinfer_dump(folder / "d", "single_prefill_with_kv_cache", first[:3], {}, first[3])
        for file, names in {"inputs": ("arg_", "kwarg_"), "outputs": ("result",)}.items():
            if place.startswith(names):
                held = torch.load(made / f"{file}.pt")
                held |= {"result_0": held.pop("result")} if place == "result_1" else {}
                torch.save({**held, place: value}, made / f"{file}.pt")
    return folder / "d"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("kind", "place"), [(kind, place) for kind, places in PLACES.items() for place in places])
def test_whatever_stands_there_is_read_or_refused_in_one_line(tmp_path: Path, run: Run, kind: str, place: str) -> None:
    codes = set()
    for title, value in odd_values().items():
        folder = tmp_path / title
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, on saving some of them
            dump = faulty(folder, kind, place, value)
        code, out, err = run("convert", dump, folder / "c")
        codes.add(code)
        assert code in (0, 2), title
        assert ".safetensors" in out if code == 0 else re.fullmatch(r"attn-diag: .+\n", err), f"{title}: {err}"
        assert not any(word in err for word in ("internal error", "damaged", "memory")), f"{title}: {err}"
        assert [file.suffix for file in folder.glob("c/*") if file.is_file()] == [".safetensors"] * (code == 0), title
        assert (folder / "c").exists() == (code == 0), title
        for file in folder.glob("c/*"):
            load(file)
        if place in ("q", "scale", "window") and kind == "torch":
            code, _, err = run("inspect", dump / "dump.pt", "--device", "cpu")
            assert code in (0, 2), title
            assert not any(word in err for word in ("internal error", "damaged", "memory")), f"{title}: {err}"
    assert 2 in codes or place in ("notes", "world_size", "meta")


def test_torch_ambiguous_names_and_mappings(tmp_path: Path) -> None:
    q, k, v = inputs()
    content = {"attn": {"query": q, "key": k, "value": v, "q": q.flip(2)}, "other": [torch.ones(2), torch.ones(3)]}
    for key in ("attn.query", "query", "*.query"):
        assert torch.equal(converted(tmp_path, content, names={"q": key}).tensors["q"][...], q)
    dump = tmp_path / "dump.pt"
    refused(dump, "several tensors may be q; found attn.query [1, 4, 24, 16] bfloat16, attn.q [1, 4, 24, 16]")
    refused(dump, "no tensor matches q=nope; found attn.query", names={"q": "nope"})
    refused(dump, "'quark' is no tensor of a capture; known: q, k, v", names={"quark": "q"})
    mapped = {"q": "a", "k": "b", "v": "b", "flash.o": "a"}
    assert converted(tmp_path, {"a": q, "b": k}, names=mapped).observations == {"flash": ("o",)}
    refused(dump, "cannot tell which tensors are q, k and v; found a [1, 4, 24, 16] bfloat16, b")


@pytest.mark.parametrize("kind", ["flashinfer", "sglang", "torch"])
def test_a_pickle_that_would_run_code(kind: str, tmp_path: Path) -> None:
    bomb, dump = Explosive(tmp_path / "boom"), tmp_path / "d"
    if kind == "flashinfer":
        path = flashinfer_dump(dump, "single_prefill_with_kv_cache", inputs(), {}, None) / "inputs.pt"
        torch.save({"arg_0": bomb}, path)
    elif kind == "sglang":
        SglangDumper(dump, 2025).dump_heads(named(inputs(), "q", "k", "v"))
        (path,) = dump.rglob("*name=q___*")
        torch.save(bomb, path)
    else:
        path = dump = tmp_path / "dump.pt"
        torch.save({**named(inputs(), "q", "k", "v"), "boom": bomb}, path)
    refused(dump, f"{path}: this pickle holds more than tensors and was not executed")
    assert not (tmp_path / "boom").exists()
    # It would have run: the fixture is not harmless.
    torch.load(path, weights_only=False)
    assert (tmp_path / "boom").exists()


def test_a_folder_of_torch_dumps(tmp_path: Path) -> None:
    for name, tensors in zip(("a/x.pt", "b/x.pt"), layer_tensors(2), strict=True):
        (tmp_path / "d" / name).parent.mkdir(parents=True)
        torch.save(named(tensors, *QKVO), tmp_path / "d" / name)
    written = convert(tmp_path / "d", tmp_path / "c")
    assert [path.name for path in written] == ["a_x.safetensors", "b_x.safetensors"]
    with pytest.raises(InputError, match=r"the dump holds several calls .*: name a folder"):
        convert(tmp_path / "d", tmp_path / "one.safetensors")
    with pytest.raises(InputError, match=r"several calls state no layer .*: --layer can name that of one call only"):
        convert(tmp_path / "d", tmp_path / "other", layer=3)
    assert only(convert(tmp_path / "d" / "a", tmp_path / "e", layer=3)).metadata.layer == 3
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no dump in this directory")
    refused(tmp_path / "nowhere", "no such file or directory")
    refused(written[0], "expected a file ending in .pt, .pth")


def test_names_that_are_too_long_for_files(tmp_path: Path) -> None:
    calls = {f"layers.{number}.{'9' * 400}": named(tensors, *QKVO) for number, tensors in enumerate(layer_tensors(2))}
    torch.save(calls, tmp_path / "dump.pt")
    written = convert(tmp_path / "dump.pt", tmp_path / "c")
    assert [load(path).metadata.layer for path in written] == [0, 1]
    dumper = SglangDumper(tmp_path / "d", 2025)
    dumper.dump_heads(named(inputs(), "q", "k", "v"), layer_id=0, tag="a" * 140, more="b" * 20)
    (tmp_path / ("deep" * 60)).mkdir()
    with pytest.raises(InputError, match="File name too long; convert it alone"):
        convert(tmp_path / "d", tmp_path / ("deep" * 60) / ("x" * 256))
    assert len(convert(tmp_path / "d", tmp_path / "one.safetensors")) == 1


def test_nothing_is_overwritten_unless_forced(tmp_path: Path) -> None:
    first, second = layer_tensors(2)
    target = tmp_path / "c.safetensors"
    torch.save(named(first, *QKVO), tmp_path / "dump.pt")
    convert(tmp_path / "dump.pt", target)
    before = target.read_bytes()
    torch.save(named(second, *QKVO), tmp_path / "dump.pt")
    with pytest.raises(InputError, match="exists; choose another place, or say --force"):
        convert(tmp_path / "dump.pt", target)
    assert target.read_bytes() == before
    convert(tmp_path / "dump.pt", target, force=True)
    assert target.read_bytes() != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.safetensors", "dump.pt"]


def test_the_kind_can_be_forced(tmp_path: Path) -> None:
    dumper = SglangDumper(tmp_path / "d", 2025)
    dumper.dump_heads(named(inputs(), "q", "k", "v"))
    assert len(convert(tmp_path / "d", tmp_path / "c", kind="sglang")) == 1
    refused(tmp_path / "d", "cannot tell which tensors are q, k and v", kind="torch")
    refused(tmp_path / "d", "no attention call among the 0 calls", kind="flashinfer")
    refused(tmp_path / "d", "kind must be one of auto", kind="vllm")


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("q", ("q", True)), ("attn_q", ("q", False)), ("Query-States", ("q", True)), ("w_q", ("w_q", True)),
        ("grad__attn_output", ("do", True)), ("grad_attn_q", ("dq", False)), ("q_grad", ("dq", True)),
        ("attn_out", ("o", True)), ("mlp_out", None), ("grad_mlp", None), ("hidden_states", ("x", True)), ("seq", None),
    ],
)  # fmt: skip
def test_names_in_use(name: str, role: tuple[str, bool] | None) -> None:
    assert role_of(name) == role


def test_exact_names_come_before_endings() -> None:
    leaves = [Leaf(n, n, (), functools.partial(torch.ones, 1)) for n in ("rope_q", "q", "k")]
    assert choose(leaves, {})["q"].path == "q"
    with pytest.raises(InputError, match=r"several tensors may be q; found rope_q \[1\] float32, norm_q \[1\] float32"):
        choose([leaves[0], Leaf("norm_q", "norm_q", (), leaves[0].read)], {})
    assert parse_map(["q=a.b", "k=c"]) == {"q": "a.b", "k": "c"}
    with pytest.raises(InputError, match="--map must be NAME=KEY"):
        parse_map(["q"])


def test_on_the_command_line(tmp_path: Path, run: Run) -> None:
    single_prefill(tmp_path / "d")
    code, out, err = run("convert", tmp_path / "d", tmp_path / "c")
    assert (code, err) == (0, "")
    (path,) = (tmp_path / "c").iterdir()
    assert out.splitlines()[0] == f"OK 1 capture of {tmp_path / 'd'}; next: attn-diag inspect {tmp_path / 'c'}"
    assert out.splitlines()[1] == str(path)
    # Every guess that is printed is in the file too.
    assert [line.strip() for line in out.splitlines()[2:]] == str(load(path).metadata.notes).split("; ")
    assert run("inspect", path)[0] == 0
    code, out, err = run("convert", tmp_path / "d", tmp_path / "c")
    assert code == 2
    assert "exists; choose another place, or say --force" in err
    args = tuple(t[0] for t in inputs())
    flashinfer_dump(tmp_path / "d", "BatchDecodeWithPagedKVCacheWrapper.run", args, {}, args[0], number=2)
    code, out, err = run("convert", tmp_path / "d", tmp_path / "c", "--force", "--from", "flashinfer")
    assert (code, out.count(".safetensors")) == (2, 1)
    assert "BatchDecodeWithPagedKVCacheWrapper.run is not supported: a paged KV cache" in err
    torch.save(named(inputs(), *"abc"), tmp_path / "dump.pt")
    options = ("--map", "q=a", "--map", "k=b", "--map", "v=c", "--layer", 3, "--scale", 0.5)
    code, out, _ = run("convert", tmp_path / "dump.pt", tmp_path / "m.safetensors", *options)
    assert (code, load(tmp_path / "m.safetensors").metadata.layer) == (0, 3)
    assert "layout=BHTD and causal=none assumed, and nothing confirms it: no O to check with" in out
    assert out.startswith("UNDECIDED 1 capture")
    assert "in 1 of which a guess is confirmed by nothing" in out.splitlines()[0]
    said = ("--force", "--causal", "none", "--layout", "BHTD")
    stated = run("convert", tmp_path / "dump.pt", tmp_path / "m.safetensors", *said, *options[:6])
    assert stated.out.startswith("OK 1 capture")
