"""``accumulation.json`` as sections of a gallery: the verdict, the error step by step, its directions, and the paper's.

    python benchmarks/failing_run/accumulation_page.py accumulation.json --out accumulation.html

Everything is drawn from the JSON alone; no GPU, no captures.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accumulation_verdict import ACROSS, ACROSS_EQUAL, BAND, CHANGE, EQUAL, NOISE, SHARE, SIZE, SPREAD, WITHIN

from attn_diag import PaperFigures
from attn_diag.reports import gallery_document, words
from attn_diag.reports.charts import Axis, Band, Chart, Gallery, Map, Section, Series, Value
from attn_diag.reports.paper import paper_gallery

Read = Callable[[dict[str, Any]], Any]

ERROR, FULL, REFERENCE = "E, delta's part of the error", "whole error of dW_Q", "true dW_Q, for comparison"
STEP = Axis("training step")
# What each test's statistic and limit are, in a table.
STATISTICS = {
    SPREAD: "t of the steps' means of delta's error",
    BAND: "largest running sum / 99 % band",
    EQUAL: "t of the steps' mean / standard error",
    SIZE: f"steps with a noise factor above {NOISE:g}",
    WITHIN: "steps above their null's 95 % quantile",
    ACROSS: "‖ΣE‖² / Σ‖E‖²",
    ACROSS_EQUAL: "the same of E / ‖E‖",
}
ALIGNMENTS = {
    "weight": "mean cosine with W_Q before the step",
    "past_change": "mean cosine with W_Q's change so far",
    "momentum": "mean cosine with Adam's momentum",
    "top": "mean cosine with W_Q's first singular direction",
    CHANGE: "cosine of the sum with W_Q's change",
}


_REDRAWN = (
    "Redrawn are Figures 3, 4, 5, 6 and 13 of Qiu & Yao (arXiv 2510.04212). Its other figures, Figure 11 among them, "
    "are not: attn-diag figures does not make them. M in Figure 4 is E above, not the momentum; p-values from here on "
    "are not adjusted, and figures of one step show the step named."
)


def sections(accumulation: dict[str, Any], run: str | None = None) -> list[Section]:
    """All sections of an ``accumulation.json``, as read by json.load. Raises ValueError for another document.

    ``run``: what the run is called, such as "arm A, seed 0"; None: by the captures' identity.
    """
    if accumulation.get("schema") != "attn-diag-accumulation" or accumulation.get("schema_version") != 2:
        raise ValueError(
            "expected attn-diag-accumulation, version 2, got "
            f"{accumulation.get('schema')}, version {accumulation.get('schema_version')}; make it with accumulation.py"
        )
    page = _Page(accumulation, run)
    return [page.verdict(), page.size(), page.directions(), page.across(), page.notes(), *page.paper()]


def read(path: Path) -> dict[str, Any]:
    """The document of a file, .json or .json.xz."""
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        found: dict[str, Any] = json.load(file)
    return found


class _Page:
    """The sections of one document."""

    def __init__(self, found: dict[str, Any], run: str | None = None) -> None:
        self.found, self.rows = found, found["steps"]
        self.steps = tuple(float(row["step"]) for row in self.rows)
        self.windows: list[dict[str, Any]] = found["over_steps"]["windows"]
        named = run if run is not None or found["run"] is None else f"run {found['run']}"
        self.of = ", ".join([*filter(None, [named]), f"layer {found['layer']}, head {found['head']}"])

    def verdict(self) -> Section:
        v = self.found["verdict"]
        header = ("test", "statistic", *(w["name"] for w in self.windows))
        rows = [header]
        for i, name in enumerate(STATISTICS):
            rows.append((name, STATISTICS[name], *(_test(w["tests"][i]) for w in self.windows)))
        spans = ", ".join(f"{w['name']}: {w['first']} to {w['last']}" for w in self.windows)
        about = (
            f"Of {self.of}; E is the part of dW_Q's error that delta's error makes. In the table: statistic (what its "
            "null stays below; for t its |value|), p after Holm. All steps are one family of "
            f"{len(v['family'])} tests at level {v['level']:g}, the thirds another. Steps of {spans}."
        )
        said = tuple(finding["sentence"] for finding in v["findings"])
        return Section("Bias, size or coherence?", (v["sentence"], *said, *self._parts(), about), tuple(rows))

    def _parts(self) -> tuple[str, ...]:
        """How many steps share the mean's sign, and what the thirds show by themselves."""
        means = [mean for row in self.rows if (mean := _plain(row["delta_mean"])) is not None]
        said = [f"The step's mean of delta's error is positive at {sum(m > 0 for m in means)} of {len(means)} steps."]
        level = self.found["verdict"]["level"]
        shown = []
        for w in self.windows[1:]:
            passed = [t["name"] for t in w["tests"] if t["p_adjusted"] is not None and t["p_adjusted"] < level]
            shown.append(f"{w['name']}: {' and '.join(passed) or 'none'}")
        if shown:
            said.append(f"Significant in a third by itself, from fewer steps: {'; '.join(shown)}.")
        return (" ".join(said),)

    def size(self) -> Section:
        sequences = "Errors and gradients of the sequences captured, in float64"
        charts = (
            self._chart(
                "share", "The error of dW_Q over dW_Q",
                f"Frobenius norms over that of the true dW_Q. {sequences}. E is what delta's error makes of it to "
                f"first order; the whole error is observed dQ's, projected. The monitor's alarm begins at {SHARE:g}.",
                "‖error‖ / ‖dW_Q‖", {ERROR: lambda r: r["share"], FULL: lambda r: r["full_share"]}, log=True,
            ),
            self._chart(
                "noise", "Noise factor of delta's error",
                "rms of delta's error over what one correct rounding of O leaves; production kernels have 0.98 to 1.4. "
                "Of all rows of the sequences captured, nothing sampled.",
                "noise factor", {"noise factor": lambda r: r["noise_factor"]}, bands=(Band("not lossy", 0.0, NOISE),),
            ),
            self._chart(
                "coherence", "Do the rows' errors of one step add up?",
                "Coherence ‖Σa‖² / Σ‖a‖² of the rows' rank-1 atoms, and the 95 % quantile of random signs of the rows.",
                "coherence",
                {"coherence": lambda r: r["coherence"], "95 % of random signs": lambda r: r["coherence_null95"]},
            ),
            self._chart(
                "first", "Share of the first singular direction",
                "Of ‖X‖², what the first singular direction holds: 1 for a matrix of rank 1.", "share of ‖X‖²",
                {
                    ERROR: lambda r: r["error"]["first_share"],
                    FULL: lambda r: (r["full"] or {}).get("first_share"),
                    REFERENCE: lambda r: r["reference"]["first_share"],
                    "Adam's momentum": lambda r: (r["momentum"] or {}).get("first_share"),
                },
            ),
            self._chart(
                "spectral-norm", "Spectral norm of the head's W_Q",
                "Largest singular value of the weight before the step.",
                "spectral norm", {"W_Q": lambda r: r["spectral_norm"]},
            ),
            self._chart(
                "logit", "Largest score", "The largest visible score alpha q·k of the sequences captured.",
                "max logit", {"max logit": lambda r: r["max_logit"]},
            ),
            self._means(),
        )  # fmt: skip
        return Section("The error of dW_Q, step by step", charts=charts)

    def _means(self) -> Chart:
        def over(row: dict[str, Any]) -> float | None:
            mean, error = _plain(row["delta_mean"]), _plain(row["delta_standard_error"])
            return mean / error if mean is not None and error else None

        return self._chart(
            "delta-t", "Mean of delta's error, in standard errors",
            "Each step's mean over the rows / its standard error, clustered by the rows' argmax key and by feature. "
            "Band: where 95 % of unbiased steps lie (normal; fewer clusters widen it).",
            "mean / standard error", {"delta": over}, bands=(Band("95 %", -1.96, 1.96),), points=True,
        )  # fmt: skip

    def directions(self) -> Section:
        chance = self.found["chance"]
        both = Band("95 % of random directions", -chance["matrix"], chance["matrix"])
        charts = []
        for name, title, label in (
            ("weight", "Does the error point along W_Q?", "cosine with W_Q"),
            ("past_change", "… along W_Q's change so far?", "cosine with W_Q's change"),
            ("top", "… along W_Q's first singular direction?", "cosine with u vᵀ"),
            ("momentum", "… along Adam's momentum?", "cosine with M"),
            ("adam", "… along Adam's step?", "cosine with M / (√V + 1e-8)"),
            ("previous", "… along the error of the step before?", "cosine with the step before"),
            ("running", "Past errors summed as Adam does, beside the momentum", "cosine with M"),
        ):
            caption = "Signed cosine of whole matrices [D, C]."
            charts.append(self._alignment(name, title, caption, label, (both,)))
        for side, features in (("left", "q's features"), ("right", "x")):
            for of, what in (("weight", "W_Q"), ("momentum", "Adam's momentum")):
                charts.append(
                    self._alignment(
                        f"{side}_{of}", f"First singular directions, {features}: error and {what}",
                        f"|cosine| of the first {side} singular vectors ({features}).",
                        "|cosine|", (Band("95 % of random directions", 0.0, chance[side]),),
                    )
                )  # fmt: skip
        charts.append(
            self._alignment(
                "momentum_share", "Share of the momentum along the past errors' first direction",
                "Of ‖M‖², what lies along u vᵀ, the first singular direction of the past steps' errors, summed as Adam "
                "sums gradients; beside it the same of the true gradients of the same sequences.",
                "share of ‖M‖²", (),
            )
        )  # fmt: skip
        about = (
            "Weight and momentum are those before the step, so that its own error is in neither. E is an error of a "
            "gradient: descent moves the weight along -E. Bands: 95 % of random directions; real matrices share "
            "structure, so lying outside at one step is no finding. The signs' tests are in the next section."
        )
        title = "Where the error points: W_Q and Adam's momentum"
        return Section(title, (self._compared(), about), charts=tuple(charts))

    def _compared(self) -> str:
        w = self.windows[0]
        if not w["compared"]:
            return "Adam's momentum was not recorded."
        return (
            f"At {w['more_aligned']} of {w['compared']} steps the error lies closer to Adam's momentum (by |cosine|, "
            "whatever its sign) than the true gradient of the same sequences does."
        )

    def across(self) -> Section:
        axis = Axis("training step", names=tuple(str(step) for step in self.found["over_steps"]["steps"]))
        charts = tuple(
            Chart(
                f"accumulation-cosines-{stem}", f"Cosine between steps: {label}",
                f"Signed cosine <X_s, X_t> / (‖X_s‖ ‖X_t‖) of all pairs of steps; {self.of}. Exact for the sequences "
                "captured; matrices of random directions would have cosines below "
                f"{self.found['chance']['matrix']:.2g} in 95 % of cases.",
                axis, axis,
                map=Map("cosine", _matrix(self.found["over_steps"][key]), diverging=True),
            )
            for stem, label, key in (
                ("error", ERROR, "error_cosines"), ("reference", REFERENCE, "reference_cosines"),
            )
        )  # fmt: skip
        signs = self.found["over_steps"]["draws"]
        about = (
            f"In the table: statistic of E (95 % of {signs:,} random signs of the steps keep its |value| below), p "
            "after Holm in one family of them all; then the true gradient's, with its own p. Mean squared cosines are "
            "over pairs of steps of first singular directions, beside the mean for random ones."
        )
        header = ("of the steps", *(w["name"] for w in self.windows))
        rows = [header]
        for i, words_ in enumerate(ALIGNMENTS.values()):
            rows.append((words_, *(_yardstick(w["alignments"][i]) for w in self.windows)))
        for side, label in (("left", "q's features"), ("right", "x"), ("rank_1", "rank 1")):
            name = f"mean squared cosine of first directions, {label}"
            rows.append((name, *(_directions(w, side) for w in self.windows)))
        for key, name in (
            ("top_change", "cosine of ΣE with the change of W_Q's first component"),
            ("spectral_growth", "growth of W_Q's spectral norm"),
        ):
            rows.append((name, *(words.number(_plain(w[key])) for w in self.windows)))
        return Section("Do the steps' errors add up?", (about,), tuple(rows), charts)

    def notes(self) -> Section:
        f = self.found
        return Section("What was measured", (f"{self.of[0].upper()}{self.of[1:]}: {f['chosen']}.", *f["notes"]))

    def paper(self) -> tuple[Section, ...]:
        """The paper's figures, rebuilt from their JSON, after words on which of them there are."""
        figures = dict(self.found["figures"])
        # figures_of asks for the head that was chosen here.
        reason = figures["chosen"]["reason"].replace("as asked for", self.found["chosen"])
        figures["chosen"] = figures["chosen"] | {"reason": reason}
        if (figures.get("prefix") or {}).get("as_observed") is False:
            why = "the recipe that was taken for the kernel's does not end at O as observed"
            figures |= {"prefix": None, "missing": {**figures["missing"], "prefix": why}}
        gallery = paper_gallery(PaperFigures.from_json(json.dumps(figures)))
        return Section("The paper's figures, of these steps", (gallery.lead, _REDRAWN)), *gallery.sections

    def _alignment(self, name: str, title: str, caption: str, label: str, bands: tuple[Band, ...]) -> Chart:
        def of(kind: str) -> Read:
            return lambda row: (row[f"{kind}_alignment"] or {}).get(name)

        lines = {ERROR: of("error"), REFERENCE: of("reference")}
        return self._chart(name.replace("_", "-"), title, caption, label, lines, bands=bands)

    def _chart(
        self, stem: str, title: str, caption: str, label: str, lines: dict[str, Read], *,
        bands: tuple[Band, ...] = (), log: bool = False, points: bool = False,
    ) -> Chart:  # fmt: skip
        drawn = tuple(
            Series(name, self.steps, tuple(_plain(get(row)) for row in self.rows), "points" if points else "line")
            for name, get in lines.items()
        )
        kept = tuple(series for series in drawn if any(value is not None for value in series.y))
        if log:
            kept = tuple(replace(s, y=tuple(v if v is not None and v > 0 else None for v in s.y)) for s in kept)
        text = f"{caption} {self.of[0].upper()}{self.of[1:]}."
        return Chart(f"accumulation-{stem}", title, text, STEP, Axis(label, log=log), kept, bands)


def _plain(value: Any) -> Value:
    """A finite number, else None: JSON keeps NaN and infinities as strings."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _matrix(values: Sequence[Sequence[Any]]) -> tuple[tuple[Value, ...], ...]:
    return tuple(tuple(map(_plain, row)) for row in values)


def _test(test: dict[str, Any]) -> str:
    if test["p_adjusted"] is None:
        return words.DASH
    return f"{_value(test)}, {_p(test['p_adjusted'])}"


def _p(value: float) -> str:
    """Kept on one line of a table's cell."""
    return f"p\u00a0=\u00a0{value:.2g}".replace("-", "\u2011")


def _value(test: dict[str, Any]) -> str:
    limit = "" if test["limit"] is None else f" ({test['limit']:.3g})"
    return f"{test['statistic']:.3g}{limit}"


def _yardstick(found: dict[str, Any]) -> str:
    if found["error"]["p_adjusted"] is None:
        return words.DASH
    reference = found["reference"]
    beside = "" if reference["p_value"] is None else f"; dW_Q\u00a0{_value(reference)}, {_p(reference['p_value'])}"
    return f"{_test(found['error'])}{beside}"


def _directions(window: dict[str, Any], side: str) -> str:
    error, reference = window["error"], window["reference"]
    return f"{error[side]:.2g} (random {error[f'{side}_random']:.2g}); dW_Q\u00a0{reference[side]:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = read(options.file)
    tool = PaperFigures.from_json(json.dumps(found["figures"])).tool
    gallery = Gallery(
        "How the error of dW_Q accumulates", f"Of {_Page(found).of}.", tuple(sections(found)), words.tool_line(tool)
    )
    options.out.write_text(gallery_document(gallery), encoding="utf-8")


if __name__ == "__main__":
    main()
