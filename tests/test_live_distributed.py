"""Two processes: one file per rank, one run; and the same bits as without capture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from builders import holds
from command_line import Programs

import attn_diag
from attn_diag.watching.monitoring.record import read_log

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Path:
    """What two processes captured; that it changed no bit they have checked themselves."""
    folder = tmp_path_factory.mktemp("ranks")
    programs.ranks(str(Path(__file__).parent / "live_worker.py"), folder)
    return folder


@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp_finely"])
def test_ranks(how: str, folder: Path) -> None:
    captures = [attn_diag.load(path) for path in sorted((folder / how / "both").iterdir())]
    found = [(c.metadata.step, c.metadata.layer, c.metadata.rank) for c in captures]
    assert found == [(step, layer, rank) for step in range(3) for layer in range(2) for rank in range(2)]
    extras = [c.metadata.extra for c in captures]
    assert {extra["world_size"] for extra in extras} == {"2"}
    assert len({extra["run"] for extra in extras}) == 1
    assert [extra["module"] for extra in extras[:3]] == ["h.0.attn", "h.0.attn", "h.1.attn"]
    for capture in captures:
        assert {"do", "dq", "dk", "dv", "x", "dq_pre", "lse"} <= capture.tensors.keys()
        assert ("w_q" in capture.tensors) == (how != "fsdp_finely")
        assert ("sharded" in str(capture.metadata.notes)) == (how == "fsdp_finely")
        assert holds(capture)
    # Each rank has its own batch.
    assert not torch.equal(captures[0].tensors["q"][...], captures[1].tensors["q"][...])
    # One rank may capture alone: nobody waits for the others.
    alone = [attn_diag.load(path) for path in (folder / how / "alone").iterdir()]
    assert {c.metadata.rank for c in alone} == {1}
    assert {c.metadata.extra["run"] for c in alone}.isdisjoint(extra["run"] for extra in extras)


@pytest.mark.parametrize("how", ["fsdp", "fsdp_finely"])
def test_a_sharded_model_is_monitored_as_a_replicated_one(how: str, folder: Path) -> None:
    replicated, sharded = (list(read_log(folder / f"{kind}.jsonl")) for kind in ("ddp", how))
    assert [check.step for check in sharded] == [0, 1, 2]
    for one, other in zip(replicated, sharded, strict=True):
        for a, b in zip(one.layers, other.layers, strict=True):
            assert (a.layer, a.module) == (b.layer, b.module)
            for name, expected in a.values.items():
                # Where the weight is sharded again before attention runs, nothing is known of dW_Q.
                lost = how == "fsdp_finely" and (name.startswith(("dw_q", "w_q", "coherence")) or name == "past_z")
                if lost:
                    assert np.isnan(b.values[name]).all(), name
                else:
                    # The same weights: two ranks' gradients add up alike in either order.
                    np.testing.assert_allclose(b.values[name], expected, rtol=1e-12, atol=0, err_msg=name)
