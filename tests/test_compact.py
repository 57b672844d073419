"""A diagnosis as commands save it: its heads in tables of columns, small, with all that reports and diff read of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from builders import SHARED, inspected, rounded_inputs, some
from command_line import Run

import attn_diag
from attn_diag.analyses.comparison.diff import compare
from attn_diag.results import compact
from attn_diag.results.diagnosis import Diagnosis, GradientError, HeadDiagnosis
from attn_diag.results.publish import schemas
from attn_diag.results.quality import QuantityVerdict
from attn_diag.results.table import known_column, packed_table, unpacked_table

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("test_compact")]

ROOT = Path(__file__).parent.parent
SCHEMA = schemas()["diagnosis-4"]


def saved(diagnosis: Diagnosis, *, full: bool = False) -> bytes:
    return b"".join(diagnosis.saved_parts(full=full))


def again(diagnosis: Diagnosis) -> Diagnosis:
    """As it is read back."""
    return Diagnosis.from_json(saved(diagnosis))


def short(number: str | float) -> float:
    return float(f"{float(number):.6g}")


def data(diagnosis: Diagnosis) -> Any:
    """Its long form, with numbers as short as the other has them; a part of an error that is null is none there."""

    def known(found: dict[str, Any]) -> dict[str, Any]:
        shares = found.get("shares")
        return found if shares is None else {**found, "shares": {k: v for k, v in shares.items() if v is not None}}

    return json.loads(diagnosis.to_json(), parse_float=short, object_hook=known)


@pytest.mark.parametrize("name", SHARED)
def test_all_is_there_but_what_is_said_to_be_left_out(name: str) -> None:
    found = inspected(name, details=1)
    bare = replace(found, captures=compact.without_details(found.captures), left_out=compact.LEFT_OUT)
    assert data(again(found)) == data(bare)
    assert saved(again(found)) == saved(found), "nothing more is lost the second time"


@pytest.mark.parametrize("name", SHARED)
def test_it_fits_its_schema(name: str) -> None:
    document = json.loads(saved(inspected(name, details=1)))
    assert (document["schema_version"], document["left_out"]) == (4, "running sums and figures")
    assert not list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(document))
    changes: list[Callable[[Any], object]] = [
        lambda d: d["heads"].update({"bias.delta.mode": [1]}),
        lambda d: d["heads"].update({"noise_factor": ["large"]}),
        lambda d: d.update(schema_version=3),
        lambda d: d.pop("kv_heads"),
    ]
    for change in changes:
        broken = json.loads(saved(inspected(name, details=1)))
        change(broken)
        assert list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(broken))


@cache
def folder(captures: int = 60, heads: int = 12) -> Diagnosis:
    """A folder's diagnosis of real heads under other numbers, with every quantity captured somewhere."""
    found = [inspected(name) for name in SHARED]
    real = cycle([head for one in found for _, _, head in one.entries()])
    pooled = cycle([o.pooled for one in found for c in one.captures for o in c.observations])
    kv = cycle([kv for one in found for c in one.captures for o in c.observations for kv in o.kv_heads])
    first, many = found[0].captures[0], []
    for number in range(captures):
        step, layer = 50 * (number // 6), number % 6
        numbered = [replace(head, layer=layer, head=i) for i, head in enumerate(islice(real, heads))]
        made = replace(
            first.observations[0],
            heads=(*numbered, replace(next(pooled), layer=layer)),
            kv_heads=tuple(replace(one, kv_head=i, query_heads=(i,)) for i, one in enumerate(islice(kv, heads))),
        )
        metadata = {**first.metadata, "step": str(step), "layer": str(layer)}
        source = f"runs/attention/captures/step{step:06d}_layer{layer:02d}_h.{layer}.attn_call0_rank0.safetensors"
        many.append(replace(first, source=source, metadata=metadata, observations=(made,)))
    return Diagnosis(found[0].tool, found[0].family, tuple(many), found[0].summary)


def test_720_heads_take_at_most_3_megabytes() -> None:
    found = folder()
    text = saved(found)
    print(len(text), "bytes")
    assert len(found.heads) == 720
    assert len(text) <= 720 * 4000 <= 3_000_000
    assert text.count(b"\n") < 1000
    # What is written on request.
    assert len(saved(found, full=True)) > 20 * len(text)
    assert Diagnosis.from_json(saved(found, full=True)) == found


def test_a_column_is_what_a_reader_expects() -> None:
    found = folder(4, 3)
    document = json.loads(saved(found))
    heads = document["heads"]
    assert [o["heads"] for c in document["captures"] for o in c["observations"]] == [4] * 4
    assert heads["head"] == [0, 1, 2, None] * 4
    entries = [head for capture in found.captures for head in capture.observations[0].heads]
    factors = [next(q.factor for q in head.quantities if q.quantity == "o") for head in entries]
    assert heads["quantities.o.factor"] == [short(some(factor)) for factor in factors]
    assert heads["rows_unknown"] == 0, "the same in all"
    assert "attribution" not in heads, "null in all"


def test_objects_that_are_there_in_some_heads_only() -> None:
    """Null is no object of nulls, and a name that is repeated is no column."""
    head = inspected("pair_T256").heads[0]
    twice = replace(head, quantities=(*head.quantities, *head.quantities[:1]))
    odd = replace(head, quantities=head.quantities[::-1], top_rows=head.top_rows[:2], noise_factor=math.nan)
    none = replace(
        head,
        swamped=None,
        verdict=None,
        noise_factor=None,
        quantities=(),
        propagation=replace(head.propagation, dq=None),
        bias=replace(head.bias, o=None),
    )
    empty = replace(none, propagation=replace(none.propagation, dq=GradientError()))
    for heads in ([head, none, empty], [none], [empty, empty], [odd, none], [head, twice], [twice]):
        found = inspected("pair_T256")
        observation = replace(found.captures[0].observations[0], heads=tuple(heads))
        found = replace(found, captures=(replace(found.captures[0], observations=(observation,)),))
        read = again(found)
        for one, other in zip(heads, read.captures[0].observations[0].heads, strict=True):
            assert (one.swamped, one.verdict) == (other.swamped, other.verdict)
            assert [q.quantity for q in one.quantities] == [q.quantity for q in other.quantities]
            assert len(one.top_rows) == len(other.top_rows)
            assert (one.bias.o is None, one.propagation.dq is None) == (
                other.bias.o is None,
                other.propagation.dq is None,
            )
            assert str(one.noise_factor)[:5] == str(other.noise_factor)[:5]
        assert saved(read) == saved(found)


BROKEN: dict[str, tuple[Callable[[Any], object], str]] = {
    "no tables": (lambda d: d.pop("heads"), "damaged or was edited"),
    "a short column": (lambda d: d["heads"]["noise_factor"].pop(), "column noise_factor has 4 cells, not 5"),
    "an unknown column": (lambda d: d["heads"].update(nothing=[1] * 5), "there is no column nothing"),
    "another count": (lambda d: d["captures"][0]["observations"][0].update(heads=9), "cells, not "),
    "a count that is none": (lambda d: d["captures"][0]["observations"][0].update(heads=None), "damaged or was edited"),
    "a text for a number": (
        lambda d: d["heads"]["conditioning"].__setitem__(0, "x"),
        "captures.0.observations.0.heads",
    ),
    "lists of several lengths": (lambda d: d["heads"]["top_rows.row"][0].pop(), "list different numbers of things"),
    "a lost column": (lambda d: d["heads"].pop("rows_all"), "rows_all"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_damaged_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, message = BROKEN[case]
    document = json.loads(saved(folder(1, 4)))
    change(document)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(document))
    with pytest.raises(attn_diag.InputError) as refused:
        attn_diag.read_diagnosis(path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)


def test_columns_are_known_by_type() -> None:
    for path in ("bias.delta.mean", "bias.delta", "quantities.dq.factor", "top_rows.row", "propagation.dq.shares.lse"):
        assert known_column(HeadDiagnosis, path), path
    for path in ("bias", "bias.delta.mode", "delta", "top_rows", "top_rows.row.x", "quantities.dq"):
        assert not known_column(HeadDiagnosis, path), path
    assert unpacked_table(QuantityVerdict, packed_table(QuantityVerdict, []), 0) == []


def test_reports_and_diff_read_it_as_they_read_all_of_it() -> None:
    full = inspected("failing_step500_L2H7")
    read = again(full)
    assert read.labels == full.labels
    assert [f.words for f in read.findings] == [f.words for f in full.findings]
    assert str(attn_diag.explain(read)) == str(attn_diag.explain(full))

    def told(diagnosis: Diagnosis) -> list[str]:
        """The report without the curves: a line of words, one of characters, and marks below it."""
        lines = diagnosis.report(200).splitlines()
        drawn = [i for i, line in enumerate(lines) if "summed over the rows" in line]
        return [line for i, line in enumerate(lines) if not {i, i - 1} & {*drawn} and line.strip(" !")]

    assert any("summed over the rows" in line for line in full.report(200).splitlines())
    assert [line for line in told(read) if line not in told(full)] == []
    same = compare(full, read)
    assert same.identical, same.summary
    assert some(same.entries[0].same_inputs)
    gauss, pair = inspected("kernels_gauss_T512"), inspected("kernels_pair_T512")
    found = compare(again(gauss), again(pair))
    assert found.counts == compare(gauss, pair).counts
    assert found.entries


@pytest.mark.parametrize("file", sorted((ROOT / "tests" / "data").glob("diagnosis_v*.json")), ids=lambda f: f.stem)
def test_older_documents_stay_what_they_are(file: Path) -> None:
    found = Diagnosis.from_json(file.read_bytes())
    assert json.loads(saved(found))["schema_version"] == found.schema_version < 3
    assert Diagnosis.from_json(saved(found)) == found


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("captures") / "a.safetensors"
    return attn_diag.Capture.from_tensors(rounded_inputs(), causal="top-left", layer=3, step=70).save(path)


def test_commands_write_tables(capture: Path, tmp_path: Path, run: Run) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    files = [tmp_path / name for name in ("short.json", "rows.csv", "rows.parquet")]
    done = run("inspect", capture, "--json", files[0], "--csv", files[1], "--parquet", files[2])
    assert (done.code, done.err) == (0, "")
    document = json.loads(files[0].read_text())
    assert document["schema_version"] == 4
    read, columnar = pandas.read_csv(files[1]), pandas.read_parquet(files[2])
    assert list(read.columns) == list(columnar.columns)
    first = ["source", "step", "layer", "head", "rank", "kernel", "dtype", "observation", "recipe"]
    assert list(read.columns[:9]) == first
    assert (read["head"].tolist(), read["step"].tolist(), read["layer"].tolist()) == ([0, 1], [70, 70], [3, 3])
    assert read["noise_factor"].tolist() == pytest.approx(columnar["noise_factor"].tolist(), rel=1e-15)
    assert read["noise_factor"].tolist() == pytest.approx(document["heads"]["noise_factor"][:2], rel=1e-5)
    assert read["verdict.labels"].tolist() == [",".join(labels) for labels in document["heads"]["verdict.labels"][:2]]
    # The short JSON alone is enough for a table.
    done = run("report", files[0], "--csv", tmp_path / "again.csv", "--html", tmp_path / "page.html")
    assert "was saved without running sums and figures; inspect --json FILE --json-full keeps them" in done.err
    assert pandas.read_csv(tmp_path / "again.csv")["head"].tolist() == [0, 1]
    done = run("inspect", capture, "--json", "-", "--json-full")
    assert json.loads(done.out)["captures"][0]["observations"][0]["heads"][0]["bias"]["delta"]["drift"]


@pytest.mark.parametrize("option", ["--csv", "--parquet"])
def test_tables_overwrite_nothing(option: str, capture: Path, run: Run) -> None:
    if option == "--parquet":
        pytest.importorskip("pyarrow")
    before = capture.read_bytes()
    assert "would be overwritten" in run("inspect", capture, option, capture).err
    assert capture.read_bytes() == before


def test_what_is_not_installed_is_said_with_what_to_do(
    capture: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn_diag.results.rows.find_spec", lambda _: None)
    done = run("inspect", capture, "--parquet", tmp_path / "x.parquet")
    assert (done.code, done.out) == (2, "")
    assert "--parquet needs pyarrow, which is not installed: pip install pyarrow" in done.err
    with pytest.raises(attn_diag.InputError, match="needs pandas, which is not installed: pip install pandas"):
        inspected("pair_T256").to_dataframe()
    assert run("inspect", capture, "--csv", tmp_path / "x.csv").code == 0


def test_no_text_in_a_table_is_a_formula() -> None:
    from attn_diag.results.rows import csv_text

    text = csv_text([{"source": '=HYPERLINK("x")', "a": 1.5}, {"source": "x\ny", "b": None}])
    assert text == 'source,a,b\n"\'=HYPERLINK(""x"")",1.5,\nx�y,,\n'
