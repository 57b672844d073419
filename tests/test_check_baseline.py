"""The baseline file: what is refused, several devices side by side, two writers at once, and which entry is used."""

from __future__ import annotations

import contextlib
import json
import math
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import attn_diag
from attn_diag.errors import InputError
from attn_diag.results.baseline import BaselineCase, BaselineEntry, BaselineFile, BaselineSize, SequenceMean
from attn_diag.testing.regression import baseline as files
from attn_diag.testing.regression import figures

CASE = BaselineCase(
    "a1", "b2", ("o",), True, {"o_excess": SequenceMean(0.1 + 0.2, 1e-17 / 3, 15.0)},
    {"o": BaselineSize(1 / 3, 0.3, SequenceMean(0.0, None, None))},
)  # fmt: skip
ENTRY = BaselineEntry("fa2", "CPU", "torch 1", 0, False, "fa2", 1.0, {"normal": CASE})


def damaged(**changes: Any) -> str:
    """A file whose case has other numbers."""
    entry = replace(ENTRY, cases={"normal": replace(CASE, **changes)})
    return files.dump(BaselineFile({entry.key: entry}))


def test_numbers_come_back_as_they_were_and_the_diff_is_stable(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "b.json"
    assert not files.store(path, ENTRY, replace=False)
    other = replace(ENTRY, device="H200")
    files.store(path, other, replace=False)
    assert files.read(path).entries == {ENTRY.key: ENTRY, other.key: other}
    text = path.read_text()
    assert text == files.dump(BaselineFile({other.key: other, ENTRY.key: ENTRY})), "order of entries does not matter"
    found = json.loads(text)
    assert list(found["entries"]) == sorted(found["entries"])
    files.store(path, ENTRY, replace=True)
    assert path.read_text() == text
    assert not list(path.parent.glob(".*")), "no lock or temporary file stays behind"


def test_save_refuses_and_update_replaces_only_its_own_entry(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    other = replace(ENTRY, device="H200")
    files.store(path, ENTRY, replace=False)
    files.store(path, other, replace=False)
    with pytest.raises(InputError, match=r"already has an entry .* use --update"):
        files.store(path, ENTRY, replace=False)
    changed = replace(ENTRY, seed=1)
    assert files.store(path, changed, replace=True)
    assert files.read(path).entries == {ENTRY.key: changed, other.key: other}


def test_the_nearest_entry() -> None:
    def keyed(*entries: BaselineEntry) -> BaselineFile:
        return BaselineFile({e.key: e for e in entries})

    newer, gpu = replace(ENTRY, versions="torch 2"), replace(ENTRY, device="H200")
    foreign = replace(ENTRY, subject="flash")
    assert files.nearest(keyed(foreign), "fa2", "CPU", "torch 1") is None
    assert files.nearest(keyed(ENTRY, newer, gpu), "fa2", "CPU", "torch 1") is ENTRY
    assert files.nearest(keyed(newer, gpu, foreign), "fa2", "CPU", "torch 1") is newer
    assert files.nearest(keyed(gpu, foreign), "fa2", "CPU", "torch 1") is gpu


DAMAGED = {
    "not JSON": ("{", "not JSON"),
    "a merge": ("<<<<<<< ours\n{}\n", "left by a git merge"),
    "a list": ("[]", "not a baseline"),
    "another schema": ('{"schema": "attn-diag-check", "schema_version": 1}', "got schema 'attn-diag-check'"),
    "another version": ('{"schema": "attn-diag-baseline", "schema_version": 2}', "expected schema_version 1, got 2"),
    "a field missing": (
        '{"schema": "attn-diag-baseline", "schema_version": 1, "entries": {"x": {"subject": "x"}}}',
        r"the first at entries\.x\.device",
    ),
    "an entry under another key": (
        files.dump(BaselineFile({"x": ENTRY})), "entry 'x' is not of that key",
    ),
    "a standard error below 0": (damaged(biases={"o_excess": SequenceMean(0.1, -1.0, 15.0)}), "'normal' of .* below 0"),
    "an error below 0": (
        damaged(sizes={"o": BaselineSize(-1.0, 0.3, SequenceMean(0.0, None, None))}), "'normal' of .* below 0",
    ),
    "a log ratio that its errors do not give": (
        damaged(sizes={"o": BaselineSize(0.3, 0.3, SequenceMean(3.0, 0.01, 15.0))}),
        "in case 'normal' of .* error of o is 0.3 beside a yardstick's of 0.3, which give no log_ratio of 3;",
    ),
    "the same of one sequence": (
        damaged(sizes={"dq": BaselineSize(0.4, 0.3, SequenceMean(-0.1, None, None))}), "give no log_ratio of -0.1",
    ),
    "an unknown field": ('{"schema": "attn-diag-baseline", "schema_version": 1, "more": 1}', "the first at more"),
    "nothing": ("", "not JSON"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "words"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_and_foreign_files_are_refused_and_left_alone(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        files.read(path)
    for save in (False, True):
        with pytest.raises(InputError, match=words):
            attn_diag.check("fa2", baseline=path, cases=["ones"], device="cpu", save=save)
    with pytest.raises(InputError, match=words):
        files.store(path, ENTRY, replace=True)
    assert path.read_text() == text


def test_no_errors_of_sequences_contradict_their_mean_ratio(tmp_path: Path) -> None:
    """Heavy tails, zeros, few sequences, any rounding added: the bound is one of mathematics."""
    generator = random.Random(0)
    sizes = {}
    for draw in range(2000):
        n, half = generator.choice([1, 2, 3, 16]), generator.choice([0.01, 0.3, 10.0])
        pairs = [(generator.choice([0.0, 1.0]) * generator.lognormvariate(0, 3), generator.lognormvariate(0, 3))
                 for _ in range(n)]  # fmt: skip
        error, yardstick = (math.sqrt(sum(p[i] ** 2 for p in pairs) / n) for i in (0, 1))
        mean = figures._mean([math.log(math.hypot(e, half) / math.hypot(y, half)) for e, y in pairs])
        sizes[f"{draw}"] = BaselineSize(error, yardstick, mean)
    path = tmp_path / "b.json"
    path.write_text(damaged(sizes=sizes))
    assert files.read(path).entries
    for size in list(sizes.values())[:50]:
        ratio = size.log_ratio
        reach = (ratio.standard_error or 0.0) * (ratio.degrees_of_freedom or 0.0)
        whole = math.log(size.error / size.yardstick) if size.error else -math.inf
        moved = replace(size, log_ratio=replace(ratio, mean=max(whole, 0.0) + reach + 0.01))
        path.write_text(damaged(sizes={"o": moved}))
        with pytest.raises(InputError, match="give no log_ratio of"):
            files.read(path)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such baseline; make it with --save"):
        attn_diag.check("fa2", baseline=tmp_path / "none.json", device="cpu")
    binary = tmp_path / "b.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read"):
        files.read(binary)
    with pytest.raises(InputError, match="cannot be read"):
        files.read(tmp_path)


@contextlib.contextmanager
def no_turn(_: Path) -> Iterator[None]:
    yield


@pytest.mark.parametrize("locked", [True, False], ids=["as it is", "mutant: without the lock"])
def test_two_writers_at_once_both_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: bool) -> None:
    path = tmp_path / "b.json"
    files.store(path, ENTRY, replace=False)
    read = files.read

    def slow(target: Path) -> BaselineFile:
        found = read(target)
        time.sleep(0.3)
        return found

    monkeypatch.setattr(files, "read", slow)
    if not locked:
        monkeypatch.setattr(files, "_turn", no_turn)
    entries = [replace(ENTRY, device=f"GPU {i}") for i in range(2)]
    writers = [threading.Thread(target=files.store, args=(path, e), kwargs={"replace": True}) for e in entries]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    kept = set(read(path).entries) == {e.key for e in (ENTRY, *entries)}
    assert kept == locked


def test_the_entry_of_other_versions_is_compared_without_bits(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    attn_diag.check("fa2", baseline=path, save=True, cases=["normal"], backward=False, device="cpu")
    (entry,) = files.read(path).entries.values()
    old = replace(entry, versions="torch 1")
    path.write_text(files.dump(BaselineFile({old.key: old})))
    found = attn_diag.check("fa2", baseline=path, cases=["normal"], backward=False, exact=True, device="cpu")
    assert found.passed
    assert found.baseline_key == old.key != found.key
    assert found.cases[0].same_bits is None
    assert any("without bits" in note for note in found.notes)
    renamed = attn_diag.check("fa2", name="mine", baseline=path, cases=["normal"], backward=False, device="cpu")
    assert renamed.baseline_key is None
    assert any("has no entry for mine" in note for note in renamed.notes)
    updated = attn_diag.check("fa2", baseline=path, update=True, cases=["normal"], backward=False, device="cpu")
    assert updated.saved == "saved"  # it was not there: the old one stays
    assert len(files.read(path).entries) == 2


def test_a_case_that_the_baseline_lacks_is_not_called_accepted(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    attn_diag.check("fa2", baseline=path, save=True, cases=["normal"], backward=False, device="cpu")

    def first(*cases: str) -> str:
        found = attn_diag.check("fa2", baseline=path, cases=cases, backward=False, device="cpu")
        return found.report(width=200).splitlines()[0]

    assert first("normal").endswith("1 case, as accepted before")
    assert first("ones").endswith("1 case, not in the baseline; as good as a well-rounded kernel")
    assert "2 cases, as accepted before but for 1, not in the baseline" in first("normal", "ones")
