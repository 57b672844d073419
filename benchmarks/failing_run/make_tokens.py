"""A token file for those who have none: the Python sources and documents on this machine, cut into words.

    python benchmarks/failing_run/make_tokens.py tokens.npy [--vocabulary 16384] [--count 20000000]

Words, runs of spaces and single signs, the most frequent of them as tokens of their own, others spelled in bytes
(tokens 1 to 256; 0 ends a document). Real text, but of one kind: where a run fails depends on it.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

_PIECES = re.compile(rb"[A-Za-z]+|[0-9]|[ ]+|.", re.DOTALL)
_BYTES = 257
_SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt", ".h"}


def documents(folders: Iterable[Path], most_bytes: int) -> Iterator[bytes]:
    """The contents of all sources and texts below ``folders``, in the order of their paths, until they are so many."""
    total = 0
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if total < most_bytes and path.suffix in _SUFFIXES and path.is_file():
                text = path.read_bytes()
                total += len(text)
                yield text


def cut(text: bytes) -> list[bytes]:
    """The pieces of a text; joined they are the text."""
    return _PIECES.findall(text)


def tokens_by_piece(texts: Iterable[bytes], vocabulary: int) -> dict[bytes, int]:
    """The token of every piece that has one of its own: the most frequent ones."""
    counts: Counter[bytes] = Counter()
    for text in texts:
        counts.update(piece for piece in cut(text) if len(piece) > 1)
    return {piece: _BYTES + i for i, (piece, _) in enumerate(counts.most_common(vocabulary - _BYTES))}


def encode(texts: Iterable[bytes], known: dict[bytes, int]) -> array[int]:
    """Tokens of the documents, each ended by 0; every piece that is no token is spelled in bytes."""
    tokens = array("H")
    for text in texts:
        for piece in cut(text):
            found = known.get(piece)
            if found is not None:
                tokens.append(found)
            else:
                tokens.extend(1 + byte for byte in piece)
        tokens.append(0)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help=".npy")
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--count", type=int, default=20_000_000, help="tokens at most")
    options = parser.parse_args()
    if not _BYTES < options.vocabulary <= 2**16:
        parser.error(f"--vocabulary must be from {_BYTES + 1} to {2**16}")
    paths = sysconfig.get_paths()
    folders = [Path(paths["purelib"]), Path(paths["stdlib"])]
    # Read twice rather than kept: a token is two bytes, its piece in memory fifty. Some 2.5 bytes of text make one.
    texts = partial(documents, folders, 3 * options.count)
    tokens = np.asarray(encode(texts(), tokens_by_piece(texts(), options.vocabulary)))[: options.count]
    np.save(options.file, tokens)
    print(f"{len(tokens):,} tokens in {options.file}")


if __name__ == "__main__":
    main()
