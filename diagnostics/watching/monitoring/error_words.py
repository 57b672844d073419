"""The reason of an alarm of a head whose error grew, with its numbers."""

from __future__ import annotations

from collections.abc import Mapping


def error_words(kind: str, of: str, lowest_at: int, values: Mapping[str, float]) -> str:
    """Say what an alarm of a head's error stands on.

    Args:
        kind: Of the alarm.
        of: Whose share was averaged, "dw_q" or "dq".
        lowest_at: The step at which that average was lowest.
        values: The check's, with "share_average" and "share_lowest".
    """
    share = values.get(f"{of}_share", values["share_average"])
    matrix = "dW_Q" if of == "dw_q" else "dQ"
    # A wrong O, too, is more than correct rounding makes: what made its error is for ``inspect`` to say.
    parts = [f"the error of O is predicted to put {share:.2g} of {matrix}'s norm in error"]
    averaged = "averaged over checks"
    if values.get("measured"):
        # Logs of before it do not have it.
        parts = [f"{matrix} is off by {share:.2g} of its norm"]
        if (part := values.get(f"{of}_share_delta")) is not None:
            parts = [f"{parts[0]}, by {part:.2g} as an error of delta makes it"]
            averaged = "that and the square of the whole, averaged over checks,"
    elif (dq_error := values.get("dq_error")) is not None:
        parts.append(f"dQ is off by {dq_error:.2g} of its norm")
    over = values.get(f"{of}_over_floor")
    if over is not None:
        parts.append(f"{over:.1f} times what correct rounding of O would")
        if (expected := values.get(f"{of}_expected_over_floor")) is not None:
            parts.append(f"a well-rounded kernel is expected to leave {expected:.1f} times that")
    if kind == "rounding":
        # Averages, as the rule compares them: the check at that step may itself have been off by more.
        average, lowest = values["share_average"], values["share_lowest"]
        parts.append(f"{averaged} {average:.2g}, lowest {lowest:.2g} at step {lowest_at}")
    elif kind == "overwhelmed":
        parts.append("more than the gradient itself in two checks on end")
    told = {"coherence": "coherence", "noise_factor": "noise factor", "max_logit": "max logit", "w_q_norm": "|W_Q|"}
    parts += [f"{text} {values[name]:.3g}" for name, text in told.items() if name in values]
    return "; ".join(parts)
