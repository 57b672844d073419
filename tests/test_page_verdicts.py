"""What a page opens on, without a browser: verdicts over steps, cards of findings, glossary; its text and its size."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hostile import NAMES, hostile_diagnosis
from planted_folders import FOLDERS, write
from snapshots import require_unchanged
from synthetic_reports import planted_run, synthetic

from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.loading import load
from attn_diag.reports import glossary, html_document
from attn_diag.reports.finding_words import where
from attn_diag.reports.timeline import Cell, Timeline, legend, timelines
from attn_diag.results.diagnosis import Diagnosis

pytestmark = pytest.mark.slow

# The terms of the paper, and those of design.md's yardsticks, that a reader cannot be expected to know.
MUST_EXPLAIN = (
    "delta", "noise floor", "counterfactual", "conditioning", "excess", "P̄", "coherence", "noise factor", "ulp", "LSE",
    "dQ", "dW_Q", "dS", "adjusted p", "n_eff", "rounding site", "recipe", "ill-conditioned", "swamped", "row maximum",
)  # fmt: skip
BLOCKS = {"p", "div", "h1", "h2", "h3", "li", "tr", "dl", "section", "article", "table", "ul", "ol", "details"}


class Text(HTMLParser):
    """The words of a page as they are read: a block a line, cells and terms with a gap."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._unread = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self._unread += tag in ("script", "style", "head")
        self.parts.append("\n" if tag in BLOCKS else "  " if tag in ("td", "th", "dd") else "")

    def handle_endtag(self, tag: str) -> None:
        self._unread -= tag in ("script", "style", "head")
        self.parts.append("\n" if tag in BLOCKS else "")

    def handle_data(self, data: str) -> None:
        self.parts.append("" if self._unread else data.replace("\n", " "))

    def text(self) -> str:
        lines = (re.sub(r" {2,}", "  ", line).strip() for line in "".join(self.parts).split("\n"))
        return "\n".join(line for line in lines if line) + "\n"


def opening(page: str) -> str:
    """What is read before the table of all heads."""
    return Text(page.partition("<main>")[2].partition('<section id="head"')[0]).text()


def table(diagnosis: Diagnosis) -> Timeline:
    [found] = timelines(diagnosis, Places())
    return found


class Places(dict[int, str]):
    """An address for every head."""

    def __missing__(self, key: int) -> str:
        return f"at{key}"


def cell(found: Timeline, line: str, step: str) -> Cell | None:
    [row] = [row for row in found.lines if row.name == line]
    return row.cells[[name for name, _ in found.columns].index(step)]


@pytest.fixture(scope="module")
def run() -> Diagnosis:
    """720 heads: layer 3 lossy from step 200 on, layer 7 biased from step 300 on."""
    return planted_run(12, 12, (100, 200, 300, 400, 500), {3: (200, "lossy"), 7: (300, "biased")})


def test_720_heads_fit_into_three_megabytes(run: Diagnosis) -> None:
    page = html_document(run)
    assert len(list(run.entries())) == 720
    assert len(page.encode()) <= 3_000_000


def test_both_findings_are_in_the_table_since_their_steps(run: Diagnosis) -> None:
    found = table(run)
    shown = {
        (row.name, step): cell.label
        for row in found.lines
        for (step, _), cell in zip(found.columns, row.cells, strict=True)
        if cell and cell.label != "clean"
    }
    lossy = {("L3", step): "lossy" for step in ("200", "300", "400", "500")}
    assert shown == lossy | {("L7", step): "biased" for step in ("300", "400", "500")}
    assert [name for name, _, _ in legend([found])] == ["lossy", "biased", "clean"]


def test_both_findings_have_a_card_with_onset_and_command(run: Diagnosis) -> None:
    page = html_document(run)
    titles = re.findall(r'<article class="card finding (\w+)">.*?<h2[^>]*>(.*?)</h2>', page, re.DOTALL)
    assert titles == [
        ("lossy", "Layer 3, all 12 heads, from step 200 on"),
        ("biased", "Layer 7, all 12 heads, from step 300 on"),
    ]
    links = re.findall(r'<p class="look"><a href="#(\w+)">Look at (L\dH\d+), step (\d+)</a>', page)
    assert [head[:2] for _, head, _ in links] == ["L3", "L7"]
    rows = dict(re.findall(r'<th scope="row"><a href="#(\w+)">(L\d+H\d+)</a>', page))
    assert all(rows[place] == head for place, head, _ in links), "a card opens another head than it names"
    assert page.index(titles[1][1]) < page.index('id="overview"'), "the figures come before a finding"


def test_few_of_a_cells_heads_are_a_frame(run: Diagnosis) -> None:
    def but_head(diagnosis: Diagnosis, heads: int) -> Diagnosis:
        """Only so many heads of layer 3 keep their finding."""
        clean = diagnosis.captures[0].observations[0].heads[0].verdict
        captures = []
        for capture in diagnosis.captures:
            [seen] = capture.observations
            changed = tuple(
                h if h.layer != 3 or (h.head or 0) < heads else replace(h, verdict=clean) for h in seen.heads
            )
            captures.append(replace(capture, observations=(replace(seen, heads=changed),)))
        return replace(diagnosis, captures=tuple(captures))

    for heads, few in ((1, True), (5, True), (6, False), (12, False)):
        found = cell(table(but_head(run, heads)), "L3", "200")
        assert found is not None
        assert (found.label, found.few) == ("lossy", few)
        assert f"{heads} of 12 heads lossy" in found.words


def test_long_runs_and_deep_models_stay_readable() -> None:
    found = table(planted_run(40, 1, tuple(range(10, 1010, 10)), {30: (500, "lossy")}))
    assert len(found.columns) <= 40
    assert found.columns[0][0] == "10"
    assert 2 <= sum(shown == "" for _, shown in found.columns) <= 6
    # Layers in which nothing was found stand together.
    assert [line.name for line in found.lines] == ["L0\u201329", "L30", "L31\u201339"]
    labels = [c.label for c in found.lines[1].cells if c]
    assert labels == ["clean"] * 16 + ["lossy"] * 18


def test_one_layer_has_a_row_a_head_and_one_step_no_table() -> None:
    one = table(planted_run(1, 3, (10, 20), {0: (20, "wrong")}))
    assert [line.name for line in one.lines] == ["H0", "H1", "H2"]
    assert timelines(synthetic(3, 2), Places()) == ()
    page = html_document(synthetic(3, 2))
    assert 'id="when"' not in page
    # What is read first where the map has no time axis over it: what was found.
    assert page.index('id="findings"') < page.index('id="overview"')


def test_many_findings_fold() -> None:
    run = planted_run(20, 2, (1, 2, 3), {layer: (1 + layer % 3, "wrong") for layer in range(0, 20, 2)})
    # One finding a layer: each of another observation.
    captures = tuple(
        replace(c, observations=tuple(replace(o, name=f"kernel {c.metadata['layer']}") for o in c.observations))
        for c in run.captures
    )
    split = Diagnosis(run.tool, run.family, captures, run.summary)
    page = html_document(split)
    assert len(split.findings) == 10
    before, _, folded = page.partition('<details class="others"><summary>4 more findings</summary>')
    assert before.count('<article class="card finding') == 6
    assert folded.count('<article class="card finding') == 4
    # Of several observations each card says which.
    assert all(f"{where(f)[1:]} in &#39;{f.observations[0]}&#39;</h2>" in page for f in split.findings)


@pytest.mark.parametrize("name", NAMES)
def test_hostile_names_stay_text_in_cards(name: str) -> None:
    page = html_document(hostile_diagnosis(name))
    assert page.count("<article") == page.count("</article")
    assert "<img" not in page.partition("<main>")[2].partition("<script")[0]


def test_every_word_is_explained_once() -> None:
    keys = [word.key for word in glossary.TERMS]
    spelled = [text for word in glossary.TERMS for text in {word.name, *word.also}]
    assert len(set(keys)) == len(keys)
    assert len(set(spelled)) == len(spelled)
    assert set(MUST_EXPLAIN) <= set(spelled)
    assert all(word.words.endswith((".", "…")) for word in glossary.TERMS)


def test_the_page_and_docs_share_the_glossary() -> None:
    page = html_document(synthetic(1, 1))
    names = re.findall(r'<dt id="word-\w+"[^>]*>([^<]*)</dt>', page)
    assert names == [word.name for word in glossary.TERMS]
    docs = Path(__file__).parent.parent / "docs" / "words.md"
    assert docs.read_text(encoding="utf-8") == glossary.document(), (
        "write it anew: python -c \"from attn_diag.reports import glossary as g; print(g.document(), end='')\""
    )


@pytest.mark.parametrize("name", ["clean", "two_findings", "growing", "nan_at_a_step", "wrong_mask", "one_rank"])
def test_what_a_page_says_first(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert name in FOLDERS
    write(tmp_path, name)
    # The page names a capture as it was given.
    monkeypatch.chdir(tmp_path)
    found = inspect_captures([load(file) for file in sorted(Path(name).glob("*.safetensors"))], device="cpu")
    require_unchanged(f"page_{name}", opening(html_document(found)))
