"""How much of a diagnosis its JSON holds, and tables of its heads for people who plot themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attn_diag.errors import InputError

if TYPE_CHECKING:
    from attn_diag.results.diagnosis import Diagnosis


@dataclass(frozen=True)
class Tables:
    """What else a diagnosis is written to."""

    json_full: Annotated[
        bool,
        typer.Option("--json-full", help="JSON with every figure of every head and its running sums: 100 kB a head."),
    ] = False
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a table with a row a head as CSV.")] = None
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The same as Parquet (needs pyarrow).")
    ] = None  # fmt: skip

    def targets(self, json: str | None) -> list[Path | None]:
        """The files that are written, beside that of ``--json``. Raises InputError where one cannot be made here."""
        if self.json_full and json is None:
            raise InputError("--json-full says what --json writes: add --json FILE, or leave it out")
        if self.parquet is not None:
            from attn_diag.results.rows import require_parquet

            require_parquet()
        return [self.csv, self.parquet]

    def write(self, diagnosis: Diagnosis) -> None:
        """Write them, each whole or not at all."""
        from attn_diag.captures.files import write_atomically
        from attn_diag.cli.delivery import write_text
        from attn_diag.results.rows import csv_text, write_parquet

        if self.csv is None and self.parquet is None:
            return
        rows = diagnosis.to_rows()
        if self.csv is not None:
            write_text(self.csv, csv_text(rows))
        if self.parquet is not None:
            write_atomically(self.parquet, partial(write_parquet, rows))
