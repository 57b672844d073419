"""The HTML report and gallery without a browser: escaping, policy, size, and what can be read back."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from builders import first_head, inspected, some
from hostile import NAMES, hostile_diagnosis
from synthetic_reports import synthetic

from attn_diag import inspect
from attn_diag.errors import InputError
from attn_diag.reports import gallery_document, html_document, html_fragment
from attn_diag.reports.charts import Axis, Chart, Gallery, Section, Series
from attn_diag.reports.embedding import thinned
from attn_diag.results.diagnosis import Diagnosis
from attn_diag.results.embedded import embedded_diagnosis
from attn_diag.results.packing import packed, unpacked

ECHARTS = Path(__file__).parent.parent / "reports" / "static" / "vendor" / "echarts"
ECHARTS_SHA256 = "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"
EVENTS = re.compile(r"on[a-z]+")


class Page(HTMLParser):
    """Scripts, styles, links and attributes of a page, as a browser would find them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.policy = ""
        self._into: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.attributes += [(tag, name, value) for name, value in given.items()]
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        self._into = None
        if tag == "style":
            self._into = self.styles
        elif tag == "script" and given.get("type") != "application/json":
            self._into = self.scripts
        if self._into is not None:
            self._into.append("")

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002
        self._into = None

    def handle_data(self, data: str) -> None:
        if self._into is not None:
            self._into[-1] += data


def policy_faults(text: str) -> list[str]:
    """What the page's own policy would refuse, and what it ought not to allow."""
    page = Page(text)
    faults = [] if page.policy.startswith("default-src 'none'; ") else ["no default-src 'none'"]
    faults += [word for word in ("unsafe-inline", "unsafe-eval", "http:", "https:", "*") if word in page.policy]
    for what, found in (("script-src", page.scripts), ("style-src", page.styles)):
        [sources] = [part.split()[1:] for part in page.policy.split("; ") if part.startswith(what)]
        hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in found]
        faults += [f"{what}: {hash}" for hash in set(hashes) ^ set(sources)]
    faults += [
        f"{tag} {name}" for tag, name, _ in page.attributes if EVENTS.fullmatch(name) or name in ("style", "src")
    ]
    faults += [f"{tag} {value}" for tag, name, value in page.attributes if name == "href" and not value.startswith("#")]
    return faults


@pytest.fixture(scope="module")
def large() -> str:
    return html_document(synthetic())


def gallery(name: str = "a") -> Gallery:
    series = Series(name, (0.0, 1.0), (1.0, None))
    chart = Chart(name, name, name, Axis(name), Axis(name), (series,))
    return Gallery(name, name, (Section(name, (name,), ((name,), (name,)), (chart,)),), name)


def test_vendored_echarts_is_the_official_file() -> None:
    data = (ECHARTS / "echarts.min.js").read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (1_121_883, ECHARTS_SHA256)
    assert hashlib.sha256(data + b" ").hexdigest() != ECHARTS_SHA256
    assert ECHARTS_SHA256 in (ECHARTS / "README.md").read_text()
    assert "Apache License" in (ECHARTS / "LICENSE").read_text()
    assert "Apache ECharts" in (ECHARTS / "NOTICE").read_text()


def test_144_heads_fit_into_two_megabytes(large: str) -> None:
    assert len(large.encode()) <= 2_000_000
    read = Diagnosis.from_json(embedded_diagnosis(large))
    heads = [head for _, _, head in read.entries()]
    assert len(heads) == 144
    # Thinned, but still the shape of a curve.
    assert all(len(head.bias.delta.drift) >= 64 for head in heads if head.bias.delta)


def test_of_more_heads_than_fit_the_worst_have_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    found = synthetic(4, 12)
    # A few thousand bytes for the findings that the page of one head has not.
    room = len(html_document(synthetic(1, 1)).encode()) + 4_000
    monkeypatch.setattr("attn_diag.reports.html._LIMIT", room)
    page = html_document(found)
    assert len(page.encode()) <= room
    read = Diagnosis.from_json(embedded_diagnosis(page))
    shown = [bool(some(head.figures).dq) for _, _, head in read.ranked()]
    assert 0 < sum(shown) < len(shown) == 48
    assert shown == sorted(shown, reverse=True)
    for (_, _, before), (_, _, after) in zip(found.entries(), read.entries(), strict=True):
        assert after.verdict == before.verdict
        assert after.noise_factor == pytest.approx(some(before.noise_factor), rel=5e-3)
        assert bool(some(after.bias.delta).drift) == bool(some(after.figures).dq)


@pytest.mark.parametrize(
    "records", [[], [1, None], [{"a": 1}, {"b": 2}], [{"a": [1, {"b": "x"}]}] * 2, [{}, {}], [[], []]]
)
def test_columns_are_the_same_records(records: list[object]) -> None:
    assert unpacked(json.loads(json.dumps(packed(records)))) == records


def test_pages_as_they_were_written_before_are_read() -> None:
    one = synthetic(1, 2)
    text = base64.b64encode(gzip.compress(one.to_json().encode())).decode()
    page = f'<script type="application/json" id="attn-diag-diagnosis">{{"gzip":"{text}"}}</script>'
    assert Diagnosis.from_json(embedded_diagnosis(page)) == one


def test_the_policy_allows_our_scripts_and_nothing_else(large: str) -> None:
    assert not policy_faults(large)
    assert not policy_faults(gallery_document(gallery()))


@pytest.mark.parametrize(
    "change",
    [
        ("<h1", "<h1 onclick=alert(1)"),
        ("</main>", "<script>alert(1)</script></main>"),
        ("</main>", "<img src=x></main>"),
        ("</main>", "<a href='javascript:alert(1)'>a</a></main>"),
        ("default-src &#39;none&#39;", "default-src *"),
        ('"use strict";', '"use strict"; '),
    ],
)
def test_the_check_of_the_policy_can_fail(large: str, change: tuple[str, str]) -> None:
    # In our own text only: ECharts and the data stay as they are.
    assert policy_faults(large.replace(*change, 1))


@pytest.mark.parametrize("name", NAMES)
def test_hostile_texts_stay_text(name: str) -> None:
    page = html_document(hostile_diagnosis(name))
    assert not policy_faults(page)
    read = Diagnosis.from_json(embedded_diagnosis(page))
    assert read.captures[0].source == name
    assert read.captures[0].observations[0].name == name
    assert not policy_faults(gallery_document(gallery(name)))
    fragment = Page(html_fragment(hostile_diagnosis(name)))
    assert not fragment.scripts
    assert not [a for a in fragment.attributes if EVENTS.fullmatch(a[1]) or a[0] in ("img", "script", "iframe")]


def test_data_hold_nothing_that_ends_a_script() -> None:
    page = html_document(hostile_diagnosis("</script><!--<script>&\u2028\u2029"))
    data = page.partition('id="attn-diag-diagnosis">')[2].partition("</script>")[0]
    assert not set("<>&\u2028\u2029") & set(data)
    assert json.loads(data)["captures"][0]["source"] == "</script><!--<script>&\u2028\u2029"


def test_small_reports_keep_every_digit_of_what_they_draw() -> None:
    one = synthetic(1, 1)
    assert Diagnosis.from_json(embedded_diagnosis(html_document(one))) == thinned(one, 512)


def test_thinning_keeps_norms_maxima_and_ends() -> None:
    heads = [first_head(diagnosis) for diagnosis in (synthetic(1, 1), thinned(synthetic(1, 1), 64))]
    before, after = (some(head.figures) for head in heads)
    assert max(after.strip.exact) == max(before.strip.exact)
    norms, thin = (some(figures.dq).reference for figures in (before, after))
    assert len(thin) == 16
    assert math.hypot(*norms) == pytest.approx(math.hypot(*thin), rel=1e-12)
    # A group's mean instead of its norm would be seen.
    assert sum(x / 8 for x in norms) != pytest.approx(math.hypot(*thin), rel=1e-3)
    whole, short = (some(head.bias.delta) for head in heads)
    assert list(short.drift)[-1] == list(whole.drift)[-1]
    assert len(short.drift) == 64
    assert short.mean == whole.mean


def test_heads_without_figures_render() -> None:
    diagnosis = synthetic(1, 2)
    capture = diagnosis.captures[0]
    [observation] = capture.observations
    bare = tuple(replace(head, figures=None) for head in observation.heads)
    diagnosis = replace(diagnosis, captures=(replace(capture, observations=(replace(observation, heads=bare),)),))
    read = Diagnosis.from_json(embedded_diagnosis(html_document(diagnosis)))
    assert [head.figures for _, _, head in read.entries()] == [None, None]


@pytest.mark.parametrize("text", ["", "<p>hello", "<title>&lt;script id='attn-diag-diagnosis'>{}</title>"])
def test_pages_of_others_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="there is none in this"):
        embedded_diagnosis(text)


def test_damaged_data_are_refused(large: str) -> None:
    start = large.index('{"gzip":"') + 200
    with pytest.raises(InputError, match="damaged"):
        embedded_diagnosis(large[:start] + "AAAA" + large[start + 4 :])


def test_a_capture_that_contradicts_its_metadata_shows_no_numbers() -> None:
    diagnosis = synthetic(1, 2)
    capture = diagnosis.captures[0]
    wrong = replace(capture.assumptions, ok=False, message="O does not fit; causal=none would")
    judged = html_document(diagnosis)
    [seen] = capture.observations
    unjudged = replace(seen, heads=tuple(replace(head, verdict=None) for head in seen.heads))
    page = html_document(replace(diagnosis, captures=(replace(capture, assumptions=wrong, observations=(unjudged,)),)))
    assert "No verdict" in page.partition('<section id="head"')[0]
    assert "O does not fit; causal=none would" in page
    rows = re.findall(r'<td data-key="([^"]*)">', page)
    assert [key for key in rows if key] == [w for w in rows if w and not w[0].isdigit()]
    assert [key for key in re.findall(r'<td data-key="([^"]*)">', judged) if key and key[0].isdigit()]


def test_a_capture_that_no_metadata_fit_is_judged_and_shown() -> None:
    diagnosis = synthetic(1, 2)
    capture = diagnosis.captures[0]
    wrong = replace(capture.assumptions, ok=False, message="O does not fit; nothing else tried does")
    seen = replace(diagnosis, captures=(replace(capture, assumptions=wrong),))
    assert "No verdict" not in html_document(seen).partition('<section id="head"')[0]
    assert "No verdict" not in (shown := html_fragment(seen))
    assert "<table>" in shown


def test_gallery_refuses_what_is_not_finite() -> None:
    broken = gallery()
    chart = broken.sections[0].charts[0]
    bad = replace(chart, series=(Series("a", (0.0,), (float("nan"),)),))
    with pytest.raises(ValueError, match="JSON compliant"):
        gallery_document(replace(broken, sections=(replace(broken.sections[0], charts=(bad,)),)))


@pytest.mark.parametrize(
    ("capture", "reached"), [("failing_step500_L2H7", [True, False, True, True, False]), ("gqa_T200", [])]
)
def test_evidence_is_what_the_diagnosis_shows(capture: str, reached: list[bool]) -> None:
    """The scores' rounding makes the failing head's error, its repair removes it; of a clean head nothing is said."""
    found = inspected(capture, details=1)
    page = html_document(found)
    steps = re.findall(r"<li( class=\"reached\")?>[^<]*<span class=\"spoken\">", page)
    assert [bool(step) for step in steps] == reached


def test_a_rounding_that_is_named_is_found() -> None:
    """The card said "The rounding that makes it is found: not yet" beside its name."""
    q, k, v = (torch.randn(1, 1, 96, 32, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    held = k.to(torch.float8_e4m3fn).float()
    o = torch.softmax(q.float() @ held.mT / 32**0.5, -1) @ v.float()
    page = html_document(inspect(q, k, v, o=o.bfloat16()))
    steps = re.findall(r"<li( class=\"reached\")?>[^<]*<span class=\"spoken\">", page)
    assert [bool(step) for step in steps] == [True, False, True, False, False]
