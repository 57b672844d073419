"""The result of ``attn_diag.mismatch``: where two runs of the same tokens part, layer by layer, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Number, Result, Tool

RunName = Literal["train", "rollout"]
CauseKind = Literal[
    "scale", "window", "mask", "sink", "softcap", "position", "norm", "weights", "storage", "merge", "lse-base",
    "coarse", "ring", "hop", "sum", "unnamed-o", "unnamed-input",
]  # fmt: skip
MismatchLabel = Literal["semantics", "rounding", "unnamed"]
Place = Literal["stream", "projection", "attention", "output"]
SharePlace = Literal["stream", "projection", "semantics", "rounding", "sum", "head", "rest"]


@dataclass(frozen=True)
class MismatchSide:
    """One of the two runs."""

    name: RunName
    """Which."""
    source: str
    """Its captures."""
    captures: int
    """How many there are, with an O."""
    calls: int
    """Calls of one layer."""
    sequences: int
    """Sequences of tokens that these were put together to."""
    kernels: tuple[str, ...]
    """What the captures say computed O."""
    dtype: str
    """Of q."""


@dataclass(frozen=True)
class DifferencePart:
    """A part of a layer's difference of O."""

    name: Literal["inputs", "semantics", "rounding"]
    """With a for train, b for rollout, R_x for attention in float64 as run x computes it: inputs is R_a(in_b) -
    R_a(in_a), what came in with q, k and v (rows at another position put back); semantics R_b(in_b) - R_a(in_b), and
    those rows; rounding the difference of the two kernels' errors, each on its own inputs, or whatever else nothing
    explains. They add up to O_b - O_a exactly."""
    size: Number
    """Its norm over that of train's O in float64."""
    share: Number
    """Its part in the squared difference, <part, O_b - O_a> / ||O_b - O_a||^2; the shares add up to 1."""
    share_error: Number | None
    """Standard error of the share, by a jackknife over tokens; null for fewer than two."""
    away: Number
    """Its mean away from zero, over the mean magnitude of train's O in float64: below 0 rollout's O is smaller."""
    away_error: Number | None
    """Standard error of that over tokens; null for fewer than two."""


@dataclass(frozen=True)
class MismatchCause:
    """What makes the runs differ in a layer."""

    layer: int
    """The model's number of the layer."""
    kind: CauseKind
    """position: q or k at another position of RoPE; norm: x, q or k times a factor a token, as of another epsilon;
    weights: another w_q or w_o; storage: q, k or v hold numbers of a format below 16 bits alone; merge: splits merged
    through a narrow LSE; ring: hops of a ring put together otherwise than in fp32; hop: one hop of a ring is off by
    itself; sum: what ranks give is not what their output projection's sum has, or is rounded below its format;
    coarse: an error of O beyond a well-rounded kernel's, by a coarser rounding, which is named where its emulation
    explains it; unnamed-o: the same, where several explanations are as good; unnamed-input: q, k, v or x differ by more
    than rounding, and nothing tried says why."""
    label: MismatchLabel
    """semantics: the two compute something else; rounding: one rounds more; unnamed: not told which."""
    side: RunName | Literal["both"]
    """The run that does not compute what its capture states; both: the captures state different things."""
    words: str
    """The cause in a sentence."""
    evidence: Literal["stated", "fitted"]
    """stated: the captures themselves differ; fitted: found in the values."""
    explained: Number | None
    """The part of the squared error (of position: of the difference of q or k) that it takes away; null: stated."""
    alternative: str
    """What comes nearest of another kind, and what it leaves; empty: nothing else was tried."""
    place: Place = "attention"
    """Where in the layer it arises: in what enters it, in q, k and v, in attention, or in the output projection."""


@dataclass(frozen=True)
class RunError:
    """How far the two runs are from float64, each on its own inputs, as its capture states what it computes."""

    train: Number
    """Norm of train's error of O over that of its O in float64."""
    rollout: Number
    """The same of rollout."""
    factor: Number | None
    """Rollout's rms error over train's; null where train's is 0."""
    low: Number | None
    """Lower end of the factor's 95 % interval, by a jackknife over tokens."""
    high: Number | None
    """Its upper end."""
    nearer: RunName | Literal["neither"]
    """The run that is nearer to the truth; neither: the interval holds 1."""
    train_noise: Number | None
    """Train's rms error over that of a well-rounded kernel, under what its capture states; null: not known."""
    rollout_noise: Number | None
    """The same of rollout."""


@dataclass(frozen=True)
class MismatchLayer:
    """One layer in both runs."""

    layer: int
    """The model's number of the layer."""
    tokens: int
    """Tokens that were compared."""
    heads: int
    """Query heads."""
    difference: Number
    """||O_b - O_a|| over the norm of train's O in float64."""
    x: Number | None
    """||x_b - x_a|| / ||x_a|| of the attention's input; null where one of the runs lacks it."""
    q: Number
    """The same of q."""
    k: Number
    """The same of the keys that the rows' own calls wrote."""
    v: Number
    """The same of their values."""
    parts: tuple[DifferencePart, ...]
    """What the difference of O consists of."""
    errors: RunError
    """Who is nearer to float64."""


@dataclass(frozen=True)
class LayerShare:
    """A part of the difference of log-probabilities: what one layer adds, by itself."""

    layer: int | None
    """The model's number of the layer; null: what is added behind the last captured call of attention."""
    place: SharePlace
    """stream: what enters the layer (behind the last: the LM head) differs from what train's model makes of rollout's O
    below, by what is outside attention: products, norms, MLPs; projection: q, k, v differ from what it makes of what
    entered in rollout (where that was not captured: of O below); semantics, rounding: O differs from what train's
    attention makes of rollout's q, k, v, by these parts; sum: the output projection's parts are added up otherwise, of
    runs captured with sums=True; head: the log-probabilities differ from what float64 makes of
    what entered the LM head, in either run; rest: what is left of the observed difference."""
    mean: Number
    """Its mean over the tokens, rollout - train."""
    mean_error: Number | None
    """Standard error of the mean over tokens; null for fewer than two."""
    rms: Number
    """Its root mean square."""
    share: Number
    """Its part in the squared observed difference; the shares add up to 1."""


@dataclass(frozen=True)
class OutsideError:
    """How far the two runs are from train's model in float64 at a place outside attention, from their own O below."""

    layer: int | None
    """The model's number of the layer; null: behind the last one."""
    place: Literal["stream", "projection", "head"]
    """stream: what enters it, after all of O below; projection: q, k and v, from what entered; head: the
    log-probabilities, from what entered the LM head."""
    train: Number
    """Norm of train's error over that of the exact value; of log-probabilities the rms error itself."""
    rollout: Number
    """The same of rollout."""
    factor: Number | None
    """Rollout's rms error over train's; null where it cannot be told."""
    low: Number | None
    """Lower end of the factor's 95 % interval, by a jackknife over tokens."""
    high: Number | None
    """Its upper end."""


@dataclass(frozen=True)
class CarriedToken:
    """A token that carries much of the difference."""

    sequence: int
    """Its sequence, from 0."""
    token: int
    """Its number in the sequence."""
    difference: Number
    """Its log-probability in rollout less that in train."""
    ratio: Number
    """exp(train - rollout), the importance ratio."""
    share: Number
    """Its part in the squared difference of all tokens."""


@dataclass(frozen=True)
class LogprobSplit:
    """The difference of log-probabilities, and what each layer adds to it."""

    tokens: int
    """Sampled tokens that were compared."""
    metrics: dict[str, Number]
    """By the names under which verl (rollout_corr/..., training/rollout_...) and slime (train_rollout_...) log them;
    rho = exp(train - rollout), clamped as there at exp(20)."""
    bias: Number
    """The mean of rollout - train."""
    bias_error: Number | None
    """Its standard error over sequences (over tokens, with fewer than two sequences); null for a single token."""
    noise: Number
    """The standard deviation of rollout - train over tokens."""
    predicted: Number | None
    """The part of the squared observed difference that the layers' shares explain together; null where there are
    none."""
    shares: tuple[LayerShare, ...]
    """One entry a layer and place; empty where no model was given."""
    carried: tuple[CarriedToken, ...]
    """The tokens with the largest differences."""
    missing: str
    """Why there are no shares, and what they need; empty where there are."""
    outside: tuple[OutsideError, ...] = ()
    """By place how far either run is from train's model outside attention; empty where no model was given."""


@dataclass(frozen=True)
class MismatchRepair:
    """What would make the two runs agree better."""

    what: str
    """What to change."""
    layers: tuple[int, ...]
    """The layers that it is about; none: all."""
    measure: Literal["O", "output", "log-probability"]
    """Of which difference the figures are: O's or the output projections', summed over the layers, or the
    log-probabilities'."""
    removes: Number
    """The part of the mean squared difference that it takes away, predicted; below 0 it would add to it."""
    left: Number
    """What is left of the rms difference."""


@dataclass(frozen=True)
class RingMerge:
    """How a rank of a ring put the results of its hops together, and which part of the error each step makes.

    Norms are over that of what is right, in float64, of some heads."""

    run: RunName
    """Which run."""
    layer: int
    """The model's number of the layer."""
    rank: int
    """Whose rows (of o and dq), or whose keys (of dk and dv)."""
    output: Literal["o", "dq", "dk", "dv"]
    """What was put together."""
    hops: int
    """Of so many."""
    error: Number
    """Norm of the whole error."""
    from_merge: Number
    """Of what putting the hops' results together adds to it, beside doing that exactly."""
    from_hops: Number
    """Of what the hops' own errors add up to; those of a gradient given the captured O and LSE."""
    from_forward: Number | None
    """Of what a gradient has from errors of O and LSE; null for o."""
    merge_factor: Number | None
    """``from_merge`` over what doing it in fp32 with one cast at the end leaves; null where that leaves nothing."""
    way: str
    """The format and order whose bits the result has; empty: none that was tried."""
    agreement: Number
    """The part of its elements that have the bits of the nearest way."""
    worst_hop: int
    """The hop furthest off, beside its roundings, in the order in which they ran."""
    worst_hop_rank: int
    """The rank whose keys it saw; of dk and dv whose rows."""
    worst_hop_error: Number
    """Norm of its error over that of what it adds."""
    worst_hop_factor: Number | None
    """The same over what rounding at every site of a kernel leaves; null where that is not known (fp32)."""
    hop_is_off: bool
    """Whether no rounding makes that: it is beyond twice that, and twice what the other hops have."""


@dataclass(frozen=True)
class ProjectionSum:
    """How a run adds up what its ranks make of an output projection (tensor parallelism)."""

    run: RunName
    """Which run."""
    layer: int
    """The model's number of the layer."""
    ranks: tuple[int, ...]
    """Whose parts are added up; one: nothing is."""
    calls: int
    """Calls of the layer that are added up so."""
    by: str
    """What adds up, such as "all-reduce by nccl"; empty for one rank."""
    dtype: str
    """Of the parts."""
    way: str
    """The format and order whose bits the sum has; empty: none that was tried, or one rank."""
    agreement: Number | None
    """The part of its elements that have the bits of the nearest way; null for one rank."""
    error: Number
    """Norm of what adding up adds to the parts' exact sum, over the norm of that."""
    in_fp32: Number
    """The same of a sum in fp32 with one cast at the end."""
    within: bool
    """Whether every element is as near to the exact sum as so many additions in the parts' format leave it."""


@dataclass(frozen=True)
class OutputPart:
    """A part of the difference of what an output projection returns, which is what is added to the stream."""

    name: Literal["inputs", "weights", "products", "sum"]
    """With a for train, b for rollout, in float64: inputs is (O_b - O_a) W_a, what came in with O; weights, of layers
    where these differ, O_b (W_b - W_a); products what rounds each rank's product (and adds a bias); sum what adding up
    over ranks adds to the exact sum of these, by its order and format. They add up to the difference exactly."""
    size: Number
    """Its norm over that of train's O_a W_a."""
    share: Number
    """Its part in the squared difference; the shares add up to 1."""
    share_error: Number | None
    """Standard error of the share, by a jackknife over tokens; null for fewer than two."""
    away: Number
    """Its mean away from zero, over the mean magnitude of train's O_a W_a: below 0 rollout's is smaller."""
    away_error: Number | None
    """Standard error of that over tokens; null for fewer than two."""


@dataclass(frozen=True)
class OutputDifference:
    """What the output projection of one layer returns, in both runs."""

    layer: int
    """The model's number of the layer."""
    tokens: int
    """Tokens that were compared."""
    difference: Number
    """The norm of the difference over that of train's O_a W_a."""
    parts: tuple[OutputPart, ...]
    """What it consists of."""


@dataclass(frozen=True, repr=False)
class Mismatch(Result):
    """The result of ``attn_diag.mismatch``."""

    tool: Tool
    """Versions and device of what produced the numbers."""
    train: MismatchSide
    """The run that the other is compared with: a."""
    rollout: MismatchSide
    """The other: b."""
    outcome: Literal["identical", "rounding", "finding"]
    """identical: every bit of every O; rounding: nothing beyond rounding and schedule is seen; finding: see
    ``causes``."""
    headline: str
    """The result in a sentence."""
    begins: int | None
    """The first layer that has a cause of its own; null: none has."""
    place: Place | None
    """Where in that layer: in its input x, in q, k and v, or in attention; null likewise."""
    sequences: int
    """Sequences that both runs have."""
    tokens: int
    """Tokens of them that were compared in a layer, at most."""
    layers: tuple[MismatchLayer, ...]
    """Every layer that both runs have."""
    causes: tuple[MismatchCause, ...]
    """What was found, by layer."""
    logprobs: LogprobSplit | None
    """The difference of log-probabilities; null where none were given."""
    repairs: tuple[MismatchRepair, ...]
    """What would remove how much, the most first."""
    notes: tuple[str, ...]
    """What was left out or assumed, in sentences."""
    merges: tuple[RingMerge, ...] = ()
    """Of ring attention whose captures hold the hops: by layer, rank and output."""
    sums: tuple[ProjectionSum, ...] = ()
    """Of runs captured with ``sums=True``: how output projections are added up over ranks, by layer and run."""
    outputs: tuple[OutputDifference, ...] = ()
    """Likewise, where both are: what these return, by layer."""
    schema: Literal["attn-diag-mismatch"] = "attn-diag-mismatch"
    schema_version: Literal[1] = 1

    @property
    def labels(self) -> frozenset[MismatchLabel]:
        """The labels of all causes."""
        return frozenset(cause.label for cause in self.causes)
