"""Faults planted in linear attention that others wrote, by changing the text of their functions, each in one place.

Hugging Face's own gated delta rule and Mamba-2 (``transformers``: plain torch, chunked), as kernels to be judged:
whole, or with one line changed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import pytest


@dataclass(frozen=True)
class Fault:
    """One line of a function, and what it is made."""

    name: str
    line: str
    made: str
    cause: tuple[str, ...] = ()
    """What it must be called, of ``attn_diag.analyses.linear.causes.CAUSES``; none: any accusation."""


_LAST = "last_recurrent_state * chunk_decay[:, :, i] + key[:, :, i].transpose(-1, -2) @ v_new"
DELTA_RULE = (
    Fault("state in BF16", _LAST, f"({_LAST}).bfloat16().float()", ("state",)),
    Fault("decays in BF16", "pairwise_decay = pairwise_decay.exp()",
          "pairwise_decay = pairwise_decay.exp().bfloat16().float()", ("decay", "decay_step")),
    Fault("log decays in BF16", "cum_decay = decay.cumsum(dim=3)", "cum_decay = decay.cumsum(dim=3).bfloat16().float()",
          ("log_decay", "log_decay_step")),
    Fault("last step of a chunk not written", "key[:, :, i].transpose(-1, -2) @ v_new",
          "key[:, :, i, :-1].transpose(-1, -2) @ v_new[:, :, :-1]", ("boundary_write",)),
    Fault("no inter-chunk term", "core_attn_out[:, :, i] = inter_chunk_attn + ", "core_attn_out[:, :, i] = ",
          ("no_inter_chunk",)),
    Fault("initial state ignored", "last_recurrent_state = initial_state.to(new_values)",
          "last_recurrent_state = torch.zeros_like(initial_state)", ("no_initial_state",)),
    Fault("initial state transposed", "initial_state.to(new_values)", "initial_state.mT.contiguous().to(new_values)",
          ("initial_state_transposed",)),
    Fault("initial state of another", "initial_state.to(new_values)", "initial_state.roll(1, 0).to(new_values)",
          ("initial_state_of_another",)),
    Fault("no gradient of the decay", "decay = g  #", "decay = g.detach()  #", ("zero",)),
    # Found out after the rest was built.
    Fault("no gradient of beta", "v_beta = value * beta.unsqueeze(-1)\n    k_beta = key * beta.unsqueeze(-1)",
          "v_beta = value * beta.detach().unsqueeze(-1)\n    k_beta = key * beta.detach().unsqueeze(-1)", ("zero",)),
    Fault("no gradient of the initial state", "initial_state.to(new_values)", "initial_state.detach().to(new_values)",
          ("zero",)),
    Fault("beta of v left out", "v_beta = value * beta.unsqueeze(-1)", "v_beta = value"),
    Fault("states do not decay between chunks", "last_recurrent_state * chunk_decay[:, :, i]", "last_recurrent_state"),
    Fault("a row does not see itself", "intra_chunk_attn = (query @ key.transpose(-1, -2)) * pairwise_decay",
          "intra_chunk_attn = ((query @ key.transpose(-1, -2)) * pairwise_decay).tril(-1)"),
    Fault("decay of the step left out", "query = query * cum_decay.exp()", "query = query * (cum_decay - decay).exp()"),
    Fault("keys decay one step too few", "(cum_decay[..., -1:] - cum_decay).exp()",
          "(cum_decay[..., -2:-1] - cum_decay).clamp(max=0.0).exp()", ("boundary_decay",)),
    Fault("values of the state not taken off", "- k_cumdecay[:, :, i] @ last_recurrent_state", ""),
    Fault("keys of the transform do not decay", "decayed_k_beta = k_beta * cum_decay.exp().unsqueeze(-1)",
          "decayed_k_beta = k_beta"),
    Fault("scale left out", "query = query * scaling", "query = query * 1.0", ("factor",)),
    Fault("scale twice", "query = query * scaling", "query = query * scaling * scaling", ("factor",)),
    Fault("heads repeated in turns", "num_k_heads != num_v_heads", "False",),
    Fault("last state is that before the last chunk", "for i in range(num_chunks):",
          "for i in range(num_chunks):\n        before = last_recurrent_state"),
    Fault("the products' operands in 8 bits", "intra_chunk_attn[:, :, i] @ v_new",
          "intra_chunk_attn[:, :, i].to(torch.float8_e4m3fn).float() @ v_new"),
)  # fmt: skip
MAMBA = (
    Fault("states in BF16", "states, final_state = new_states[:, :-1], new_states[:, -1]",
          "states, final_state = new_states.bfloat16().float()[:, :-1], new_states.bfloat16().float()[:, -1]",
          ("state", "inter", "operands")),
    Fault("decays in BF16", "L = torch.exp(segment_sum(A))", "L = torch.exp(segment_sum(A)).bfloat16().float()",
          ("decay",)),
    Fault("no inter-chunk term", "output = (Y_diag + Y_off)", "output = (Y_diag + Y_off * 0)", ("no_inter_chunk",)),
    Fault("initial state ignored", "if initial_states is not None\n", "if False\n", ("no_initial_state",)),
    Fault("no gradient of the decay", "A = A.to(hidden_states.dtype) * dt.float()",
          "A = (A.to(hidden_states.dtype) * dt.float()).detach()"),
    Fault("x is not multiplied by dt", "hidden_states = hidden_states * dt[..., None].float()",
          "hidden_states = hidden_states"),
    Fault("states do not decay to the chunk's end", "B_decay = B * decay_states.permute(0, -2, -1, 1)[..., None]",
          "B_decay = B"),
    Fault("a row does not see itself", "M = G * L.permute(0, 2, 3, 4, 1)",
          "M = G * L.permute(0, 2, 3, 4, 1) * torch.ones(L.shape[-1], L.shape[-1]).tril(-1)[:, :, None]"),
    Fault("o of states without their decay", "state_decay_out = torch.exp(A_cumsum)",
          "state_decay_out = torch.ones_like(A_cumsum)"),
    Fault("A once too often", "A = A.to(hidden_states.dtype) * dt.float()",
          "A = A.to(hidden_states.dtype) * dt.float() * 1.02"),
)  # fmt: skip


def foreign(operator: str) -> Callable[..., Any]:
    """Hugging Face's own function, without what dispatches to other packages."""
    if operator == "mamba2":
        module = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
        found = module.mamba2_chunk_scan
    else:
        module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
        found = module.torch_chunk_gated_delta_rule
    function: Callable[..., Any] = inspect.unwrap(found)
    return function


def planted(operator: str, fault: Fault | None) -> Callable[..., Any]:
    """It with one line changed."""
    function = foreign(operator)
    if fault is None:
        return function
    text = inspect.getsource(function)
    # Without its decorator.
    text = text[text.index("def ") :]
    assert text.count(fault.line) >= 1, f"{fault.name}: transformers has no such line any more: {fault.line}"
    text = text.replace(fault.line, fault.made)
    if fault.name.startswith("last state is"):
        text = text.replace("None if not output_final_state else last_recurrent_state", "before")
    if fault.name.startswith("heads repeated"):
        text = text.replace("    # Make sure all", "    turns = num_v_heads // num_k_heads\n"
                            "    query, key = query.repeat(1, 1, turns, 1), key.repeat(1, 1, turns, 1)\n"
                            "    # Make sure all")  # fmt: skip
    space = dict(vars(sys.modules[function.__module__]))
    exec(compile(text, f"<{fault.name}>", "exec"), space)
    made = space[function.__name__]
    assert isinstance(made, FunctionType)
    return made
