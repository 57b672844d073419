"""A token file for those who have none: the Python sources and documents on this machine, cut into words.

    python benchmarks/failing_run/make_tokens.py tokens.npy [--vocabulary 16384] [--count 60000000]

Words, runs of spaces and single signs, the most frequent of them as tokens of their own, others spelled in bytes
(tokens 1 to 256; 0 ends a document). Real text, but of one kind: where a run fails depends on it.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_PIECES = re.compile(rb"[A-Za-z]+|[0-9]|[ ]+|.", re.DOTALL)
_BYTES = 257


def documents(folders: list[Path]) -> Iterator[bytes]:
    """The contents of all sources and texts below ``folders``, in the order of their paths."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".md", ".rst", ".txt", ".pyi", ".h") and path.is_file():
                yield path.read_bytes()


def cut(text: bytes) -> list[bytes]:
    """The pieces of a text; joined they are the text."""
    return _PIECES.findall(text)


def encode(texts: list[list[bytes]], vocabulary: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """Tokens of the documents, each ended by 0; every piece that is no token is spelled in bytes."""
    counts = Counter(piece for text in texts for piece in text if len(piece) > 1)
    known = {piece: _BYTES + i for i, (piece, _) in enumerate(counts.most_common(vocabulary - _BYTES))}
    tokens: list[int] = []
    for text in texts:
        for piece in text:
            found = known.get(piece)
            tokens.extend([1 + byte for byte in piece] if found is None else [found])
        tokens.append(0)
    return np.array(tokens, np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help=".npy")
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--count", type=int, default=60_000_000, help="tokens at most")
    options = parser.parse_args()
    if not _BYTES < options.vocabulary <= 2**16:
        parser.error(f"--vocabulary must be from {_BYTES + 1} to {2**16}")
    paths = sysconfig.get_paths()
    texts, total = list[list[bytes]](), 0
    for document in documents([Path(paths["purelib"]), Path(paths["stdlib"])]):
        texts.append(cut(document))
        total += len(texts[-1])
        if total > options.count:
            break
    tokens = encode(texts, options.vocabulary)[: options.count]
    np.save(options.file, tokens)
    print(f"{len(tokens):,} tokens of {len(texts):,} documents in {options.file}")


if __name__ == "__main__":
    main()
