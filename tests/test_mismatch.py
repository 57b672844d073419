"""Two runs of a tiny model: matched across layouts, their difference split exactly, planted faults named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mismatch_runs as runs
import numpy as np
import pytest
import torch
from builders import some
from command_line import Run
from tiny_models import transformers_model
from torch import Tensor

import attn_diag
from attn_diag.analyses.mismatch.logprobs import Logprobs, metrics_of
from attn_diag.captures.capture import Capture
from attn_diag.errors import InputError
from attn_diag.results.mismatch import Mismatch
from attn_diag.watching.forced_runs import ForcedModel

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")

# A fault of each kind, the layer that it is planted in, and how rollout is laid out.
CASES = {
    "sink": (1, "static"), "scale": (0, "dynamic"), "window": (1, "static"), "position": (0, "chunked"),
    "weights": (1, "dynamic"), "merge": (0, "dynamic"), "norm": (1, "alone"), "softcap": (0, "static"),
}  # fmt: skip


Planted = Mapping[str, tuple[Path, tuple[Tensor, Tensor], tuple[runs.Engine, runs.Engine]]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    found = {}
    for fault, (layer, layout) in {**CASES, "none": (0, "chunked")}.items():
        folder = tmp_path_factory.mktemp(fault)
        _, _, logprobs, engines = runs.both_runs(0, None if fault == "none" else fault, layer, layout, folder, layers=2)
        found[fault] = folder, logprobs, engines
    return found


@pytest.fixture(scope="module")
def results(both: Planted) -> dict[str, Mismatch]:
    return {name: attn_diag.mismatch(f / "train", f / "rollout") for name, (f, _, _) in both.items()}


@pytest.mark.parametrize("fault", CASES)
def test_a_fault_is_named_with_its_layer_and_nothing_else(results: dict[str, Mismatch], fault: str) -> None:
    found = results[fault]
    assert [(cause.layer, cause.kind) for cause in found.causes] == [(CASES[fault][0], fault)]
    assert found.begins == CASES[fault][0]
    assert found.outcome == "finding"
    assert found.repairs[0].layers == (CASES[fault][0],) or fault == "merge"


def test_without_a_fault_nothing_but_rounding_is_named(results: dict[str, Mismatch]) -> None:
    found = results["none"]
    assert (found.outcome, found.causes, found.begins) == ("rounding", (), None)
    assert found.tokens == runs.BATCH * runs.LENGTH
    assert not found.notes
    assert found.report().startswith("OK nothing beyond rounding")


def test_shares_of_o_add_up_and_the_size_is_that_of_the_captures(results: dict[str, Mismatch], both: Planted) -> None:
    for found in results.values():
        for layer in found.layers:
            assert sum(part.share for part in layer.parts) == pytest.approx(1.0, abs=1e-9)
    # By hand: the trainer's O beside the decoded rows'.
    folder = both["none"][0]
    captures = [attn_diag.load(path) for path in sorted((folder / "train").glob("*.safetensors"))]
    train = next(c for c in captures if c.metadata.layer == 1).tensors["o"][...].double()
    decoded = [attn_diag.load(path) for path in (folder / "rollout").glob("*.safetensors")]
    decoded.sort(key=lambda c: (c.metadata.step, int(c.metadata.extra["call"])))
    rows = [c.tensors["o"][...].double() for c in decoded if c.metadata.layer == 1]
    apart = torch.cat(rows, 2) - train
    assert results["none"].layers[1].difference == pytest.approx(float(apart.norm() / train.norm()), rel=1e-3)


def test_the_nearer_run_is_the_one_without_the_fault(results: dict[str, Mismatch]) -> None:
    errors = results["merge"].layers[0].errors
    assert errors.nearer == "train"
    assert errors.rollout > errors.train
    assert results["scale"].layers[0].errors.factor is not None


def test_layers_explain_the_difference_of_log_probabilities(
    both: Planted,
) -> None:
    logprobs = both["window"][1]
    mask = _sampled(logprobs)
    found = _explained(both["window"])
    split = found.logprobs
    assert split is not None
    layers = [share for share in split.shares if share.layer is not None]
    assert sum(share.share for share in layers) == pytest.approx(1.0, abs=0.1)
    guilty = max(layers, key=lambda share: share.share)
    assert (guilty.layer, guilty.place) == (1, "semantics")
    assert found.repairs[0].what == "the same window"
    assert found.repairs[0].removes > 0.9
    observed = (logprobs[1] - logprobs[0])[mask > 0]
    assert split.bias == pytest.approx(float(observed.mean()))
    assert Mismatch.from_json(found.to_json()) == found


def _sampled(logprobs: tuple[Tensor, Tensor]) -> Tensor:
    mask = torch.zeros(logprobs[0].shape)
    mask[:, runs.PROMPT - 1 :] = 1
    return mask


def _explained(planted: tuple[Path, tuple[Tensor, Tensor], tuple[runs.Engine, runs.Engine]]) -> Mismatch:
    folder, logprobs, (train, rollout) = planted
    assert train.hidden is not None
    assert rollout.hidden is not None
    return attn_diag.explain_logprobs(
        train.model, runs.tokens_of(0), folder / "train", folder / "rollout", logprobs=logprobs,
        mask=_sampled(logprobs), hidden=(train.hidden, rollout.hidden),
    )  # fmt: skip


def test_rounding_outside_attention_has_its_shares_and_they_add_up(both: Planted) -> None:
    """Without a fault most of the difference arises outside attention."""
    found = _explained(both["none"])
    assert found.causes == ()
    assert found.logprobs is not None
    shares = {(share.layer, share.place): share.share for share in found.logprobs.shares}
    assert abs(shares.pop((None, "rest"))) < 0.1
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.1)
    assert shares[None, "stream"] + shares[1, "stream"] > 0.2
    # The kernel alone makes it all: products that see the same bits give the same bits.
    same = next(repair for repair in found.repairs if repair.what.startswith("the same attention kernel"))
    assert same.left == 0


def test_another_norm_behind_attention_is_found_with_the_model(tmp_path: Path) -> None:
    """Its effect is of rounding's size: without the model nothing is said, with it the place."""
    _, _, logprobs, engines = runs.both_runs(0, "mlp-norm", 0, "dynamic", tmp_path, layers=2)
    found = _explained((tmp_path, logprobs, engines))
    (cause,) = found.causes
    assert (cause.layer, cause.kind, cause.place, cause.side) == (1, "unnamed-input", "stream", "rollout")
    assert "behind attention of layer 0" in cause.words
    assert found.headline.startswith("the runs part in layer 1")


def test_a_scale_that_grows_with_the_context_is_not_called_a_scale(tmp_path: Path) -> None:
    """A constant scale explains nine tenths of it, and leaves three times the rounding."""
    runs.both_runs(1, "temperature", 0, "dynamic", tmp_path, layers=1)
    (cause,) = attn_diag.mismatch(tmp_path / "train", tmp_path / "rollout").causes
    assert cause.kind == "unnamed-o"
    assert "is not all of it" in cause.words


def test_hidden_states_of_another_shape_are_refused(both: Planted) -> None:
    folder, logprobs, (train, _) = both["none"]
    with pytest.raises(InputError, match="what enters the LM head"):
        attn_diag.explain_logprobs(
            train.model, runs.tokens_of(0), folder / "train", folder / "rollout", logprobs=logprobs,
            hidden=(torch.zeros(1), torch.zeros(1)),
        )  # fmt: skip


@pytest.mark.parametrize("name", ["flash_attention_of_a_test", "fails_in_a_test"])
def test_attention_that_float64_is_not_for_is_replaced_or_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As flash attention takes 16 bits alone, and FlexAttention compiles for no float64; a user's is not replaced."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def fails(*_: object, **__: object) -> tuple[Tensor, None]:
        raise TypeError("16 bits alone")

    model: Any = transformers_model("llama", "sdpa").model
    ids = torch.arange(12)[None]
    right = ForcedModel(model, ids, torch.float64, {}).run().logprobs
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, fails)
    model.config._attn_implementation = name
    forced = ForcedModel(model, ids, torch.float64, {})
    if name.startswith("flash"):
        assert torch.allclose(forced.run().logprobs, right, atol=1e-5)
    else:
        with pytest.raises(InputError, match=r"'fails_in_a_test', failed in torch.float64.*set_attn_implementation"):
            forced.run()


def test_metrics_are_those_of_the_trainers() -> None:
    """By the formulas of verl's documentation, on numbers that can be followed."""
    train, rollout = np.log([[0.5, 0.25]]), np.log([[0.4, 0.5]])
    found = attn_diag.Logprobs(train, rollout)
    rho = np.array([0.5 / 0.4, 0.25 / 0.5])
    metrics = metrics_of(found)
    assert metrics["rollout_corr/kl"] == pytest.approx(-np.log(rho).mean())
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((rho - np.log(rho) - 1).mean())
    assert metrics["rollout_corr/chi2_token"] == pytest.approx(np.square(rho).mean() - 1)
    assert metrics["rollout_corr/chi2_seq"] == pytest.approx(np.square(rho.prod()) - 1)
    assert metrics["rollout_corr/ppl_ratio"] == pytest.approx(rho.prod() ** -0.5)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.25)
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(np.abs(np.log(rho)).mean())


def test_a_mask_counts_and_other_shapes_are_refused() -> None:
    with pytest.raises(InputError, match="alike"):
        Logprobs(np.zeros((1, 2)), np.zeros((1, 3)))
    with pytest.raises(InputError, match="NaN"):
        Logprobs(np.zeros((1, 2)), np.array([[0.0, np.nan]]))
    masked = Logprobs(np.zeros((1, 2)), np.array([[0.5, np.nan]]), np.array([[True, False]]))
    assert masked.difference.tolist() == [[0.5, 0.0]]


@pytest.mark.parametrize(("kind", "how", "cache"), [("llama", "sdpa", "static"), ("gemma2", "eager", None)])
def test_generate_on_padded_prompts_is_its_own_training_forward(
    kind: str, how: str, cache: str | None, tmp_path: Path
) -> None:
    """Prompts padded on the left, decoded; trained on padded on the right; in gemma2 one layer of two has a window."""
    model: Any = transformers_model(kind, how).model.bfloat16().eval()
    prompts = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(prompts)
    real[1, :4] = 0
    with attn_diag.capture(model, tmp_path / "rollout", batch=None, calls=None):
        out = model.generate(
            prompts, attention_mask=real, max_new_tokens=5, do_sample=False, pad_token_id=0, cache_implementation=cache
        )
    ids = torch.stack([out[0], torch.cat([out[1, 4:], out.new_zeros(4)])])
    real = torch.ones_like(ids)
    real[1, -4:] = 0
    with attn_diag.capture(model, tmp_path / "train", batch=None, calls=None), torch.no_grad():
        model(ids, attention_mask=real)
    found = attn_diag.mismatch(tmp_path / "train", tmp_path / "rollout")
    assert found.causes == ()
    assert [layer.tokens for layer in found.layers] == [13 + 9, 13 + 9]
    assert max(layer.difference for layer in found.layers) < 0.02


def _drawn(length: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, length, 16, generator=generator).bfloat16() for _ in range(3))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return {"q": q, "k": k, "v": v, "o": o}


def test_packed_paged_and_padded_rows_are_the_same_tokens() -> None:
    """Two sequences, as a padded batch in the one run, packed and on pages in the other; every bit is the same."""
    one, other = _drawn(9, 0), _drawn(6, 1)
    batch = {n: torch.cat([one[n], torch.nn.functional.pad(other[n], (0, 0, 3, 0))]) for n in one}
    hidden = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    hidden[1, :, :, :3] = False
    train = Capture.from_tensors({**batch, "mask": hidden}, layer=0)
    packed = {n: torch.cat([other[n], one[n]], 2) for n in one} | {"cu_seqlens": torch.tensor([0, 6, 15])}
    found = attn_diag.mismatch(train, Capture.from_tensors(packed, causal="top-left", layer=0))
    assert (found.outcome, found.tokens, found.sequences) == ("identical", 15, 2)
    pool = torch.zeros(5, 4, 2, 16, dtype=torch.bfloat16)
    pages = {"k": pool.clone(), "v": pool.clone()}
    for name, held in pages.items():
        held.view(-1, 2, 16)[4 * 3 : 4 * 3 + 4] = one[name][0].transpose(0, 1)[:4]
        held.view(-1, 2, 16)[4 * 1 : 4 * 1 + 4] = one[name][0].transpose(0, 1)[4:8]
        held.view(-1, 2, 16)[0:1] = one[name][0].transpose(0, 1)[8:]
    step = {"q": one["q"][:, :, -1:], "o": one["o"][:, :, -1:], **pages} | {
        "page_table": torch.tensor([[3, 1, 0]]), "cache_seqlens": torch.tensor([9]),
    }  # fmt: skip
    found = attn_diag.mismatch(train, Capture.from_tensors(step, layer=0))
    assert (found.outcome, found.tokens) == ("identical", 1)


def test_other_tokens_or_layers_are_told() -> None:
    one = Capture.from_tensors(_drawn(9, 0), causal="top-left", layer=0)
    with pytest.raises(InputError, match="share no sequence"):
        attn_diag.mismatch(one, Capture.from_tensors(_drawn(9, 5), causal="top-left", layer=0))
    with pytest.raises(InputError, match="share no layer"):
        attn_diag.mismatch(one, replace(one, metadata=replace(one.metadata, layer=3)))


def test_inputs_that_part_between_two_layers_are_no_rounding_where_x_was_not_captured() -> None:
    """Values of other heads behind a layer that is the same in every bit; two layers further on that says nothing."""
    first, second = _drawn(40, 0), _drawn(40, 1)
    swapped = second | {"v": second["v"].flip(1)}
    q, k, v = (swapped[n] for n in "qkv")
    swapped["o"] = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    for layer, outcome in ((1, "finding"), (2, "rounding")):
        train, rollout = (
            [Capture.from_tensors(t, causal="top-left", layer=n) for n, t in ((0, first), (layer, other))]
            for other in (second, swapped)
        )
        found = attn_diag.mismatch(train, rollout)
        assert found.outcome == outcome
        assert [(c.layer, c.kind) for c in found.causes] == ([(1, "unnamed-input")] if layer == 1 else [])


def test_a_scale_that_is_in_q_is_none() -> None:
    """An engine that multiplies q by the scale states 1, and computes the same."""
    drawn = _drawn(40, 0)
    one = Capture.from_tensors(drawn, causal="top-left", layer=0)
    folded = drawn | {"q": drawn["q"] * 0.25}
    found = attn_diag.mismatch(one, Capture.from_tensors(folded, causal="top-left", scale=1.0, layer=0))
    assert (found.outcome, found.causes) == ("identical", ())


def test_what_captures_state_differently_is_named() -> None:
    drawn = _drawn(40, 0)
    one = Capture.from_tensors(drawn, causal="top-left", layer=0)
    o = torch.nn.functional.scaled_dot_product_attention(drawn["q"], drawn["k"], drawn["v"], is_causal=True, scale=0.3)
    (cause,) = attn_diag.mismatch(one, Capture.from_tensors(drawn | {"o": o}, causal="top-left", scale=0.3)).causes
    assert (cause.kind, cause.evidence, cause.side) == ("scale", "stated", "both")
    seen = torch.ones(40, 40, dtype=torch.bool).tril() & torch.ones(40, 40, dtype=torch.bool).triu(-9)
    o = torch.nn.functional.scaled_dot_product_attention(drawn["q"], drawn["k"], drawn["v"], attn_mask=seen)
    (cause,) = attn_diag.mismatch(one, Capture.from_tensors(drawn | {"o": o, "mask": seen})).causes
    assert (cause.kind, cause.evidence) == ("window", "stated")
    assert cause.words == "no window in train, a window of 10 keys in rollout (60 of 80 rows)"


def test_the_command_says_what_the_function_finds(both: Planted, tmp_path: Path, run: Run) -> None:
    folder, logprobs, _ = both["weights"]
    np.savez(tmp_path / "logprobs.npz", train_logprobs=logprobs[0].numpy(), rollout_logprobs=logprobs[1].numpy())
    told = run(
        "mismatch", folder / "train", folder / "rollout", "--logprobs", tmp_path / "logprobs.npz", "--json",
        tmp_path / "found.json", "--html", tmp_path / "page.html", "--fail-on", "semantics",
    )  # fmt: skip
    assert told.code == 1, told.err
    words = "weights quantised another way: train INT4 in groups of 128, rollout INT4 in groups of 32"
    assert " ".join(told.out.split()).startswith(f"FAIL the runs part in layer 1: {words}")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["causes"][0]["kind"] == "weights"
    assert found["logprobs"]["missing"]
    assert "groups of 128" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("fault", ["none", "missing", "scale", "weights", "kernel"])
def test_a_fault_of_one_data_parallel_rank_is_found(fault: str) -> None:
    """Ranks cannot be merged in that layer alone, nor where a file is missing: rows are compared all the same."""
    train, rollout = [], []
    for layer in range(3):
        q, k, v = (torch.randn(4, 2, 48, 16, generator=torch.Generator().manual_seed(3 * layer + i)) for i in range(3))
        x, w_q = torch.randn(4, 48, 32), torch.randn(32, 32, generator=torch.Generator().manual_seed(layer))
        tensors = {name: t.bfloat16() for name, t in {"q": q, "k": k, "v": v, "x": x, "w_q": w_q}.items()}

        def attended(part: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
            q, k, v = (part[name] for name in "qkv")
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            return {**part, "o": o}

        stated: dict[str, Any] = {"causal": "top-left", "layer": layer, "step": 0}
        train.append(Capture.from_tensors(attended(tensors, 0.25), scale=0.25, **stated))
        for rank in range(1 if fault == "missing" and layer == 1 else 0, 2):
            faulty = layer == 1 and rank == 1
            part = {name: t if name == "w_q" else t[2 * rank : 2 * rank + 2] for name, t in tensors.items()}
            part |= {"w_q": part["w_q"] * 1.0625} if faulty and fault == "weights" else {}
            scale = 0.26 if faulty and fault == "scale" else 0.25
            used = 0.27 if faulty and fault == "kernel" else scale
            extra = {"run": "1", "call": "0", "world_size": "2"}
            rollout.append(Capture.from_tensors(attended(part, used), scale=scale, rank=rank, extra=extra, **stated))
    found = attn_diag.mismatch(train, rollout)
    assert [layer.tokens for layer in found.layers] == [192, 96 if fault == "missing" else 192, 192]
    if fault in ("none", "missing"):
        assert found.outcome == "identical"
        assert ("Layer 1: 96 of 192 tokens were compared." in found.notes) == (fault == "missing")
        assert ("O of 96 to 192 tokens of 4 sequences" in found.headline) == (fault == "missing")
        return
    (cause,) = found.causes
    kinds = {"scale": "scale", "weights": "weights", "kernel": "coarse"}
    assert (cause.layer, cause.kind) == (1, kinds[fault]), found.headline
    assert ("in 2 of 4 sequences" in cause.words) == (fault == "scale")


def test_tensor_parallel_ranks_that_differ_are_refused() -> None:
    drawn = _drawn(40, 0)
    one = Capture.from_tensors(drawn, causal="top-left", layer=0)
    ranks = [
        Capture.from_tensors(
            {name: t[:, rank : rank + 1] for name, t in drawn.items()}, causal="top-left", layer=0, rank=rank,
            head_offset=rank, scale=0.25 + rank * 0.01, extra={"run": "1", "call": "0", "world_size": "2"},
        )
        for rank in range(2)
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"rank 0: scale is 0\.26, not 0\.25"):
        attn_diag.mismatch(one, ranks)


@pytest.mark.parametrize("levels", [None, 15, 4095])
def test_a_cache_that_is_quantised_once_it_is_written_is_storage(levels: int | None) -> None:
    """The call that writes a key sees it as it was; only later ones find the cache's few bits."""
    whole = _drawn(40, 0)
    prompt = {name: t[:, :, :32] for name, t in whole.items()}
    step = {name: t[:, :, 32:] for name, t in whole.items()} | {name: whole[name].clone() for name in "kv"}
    for name in "kv" if levels else "":
        width = whole[name].abs().amax(3, keepdim=True).float() * 2 / some(levels)
        step[name][:, :, :32] = ((whole[name].float() / width).round() * width).bfloat16()[:, :, :32]
    seen = torch.ones(8, 40, dtype=torch.bool).tril(32)
    step["o"] = torch.nn.functional.scaled_dot_product_attention(step["q"], step["k"], step["v"], attn_mask=seen)
    engine = [
        Capture.from_tensors(prompt, causal="top-left", layer=0, step=0),
        Capture.from_tensors(step, causal="bottom-right", layer=0, step=1),
    ]
    found = attn_diag.mismatch(Capture.from_tensors(whole, causal="top-left", layer=0), engine)
    assert found.tokens == 40
    assert [(c.kind, c.side) for c in found.causes] == ([("storage", "rollout")] if levels == 15 else []), (
        found.headline
    )
