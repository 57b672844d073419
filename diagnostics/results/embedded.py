"""The diagnosis inside an HTML report: found in its script element, unpacked and put together."""

from __future__ import annotations

import base64
import json
import zlib
from html.parser import HTMLParser
from typing import Any

from attn_diag.errors import InputError
from attn_diag.results.packing import unpacked

# How many times its packed size a diagnosis may have, if it is larger than that of any small page: the JSON of 144
# unlike heads has 3 to 5, that of 1,000 equal ones 136 (10 MB).
_RATIO, _SMALL = 16, 2**25
# What tells zlib that a gzip header comes first.
_GZIP = 16
ELEMENT = "attn-diag-diagnosis"


def embedded_diagnosis(text: str) -> str:
    """The JSON of the diagnosis that a page of ``html_document`` shows, for ``Diagnosis.from_json``.

    Its running sums and figures are thinned as the page needed. Raises InputError where there is none in ``text``.
    """
    found = _Element()
    found.feed(text)
    if found.text is None:
        raise InputError(
            f'expected a page that attn-diag wrote, with a script element of id "{ELEMENT}"; there is none in this '
            "one: make it anew with attn-diag inspect --html, or give the JSON of --json"
        )
    try:
        data = json.loads(found.text)
        if isinstance(data, dict) and "details" in data:
            return json.dumps(_joined(json.loads(_unzipped(data["gzip"])), data["details"]))
        if isinstance(data, dict) and "gzip" in data:  # as pages were written before
            return _unzipped(data["gzip"])
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, zlib.error) as error:
        raise InputError(f"the diagnosis in this page is damaged ({error}); make the page anew") from error
    return found.text


def _joined(whole: dict[str, Any], details: list[str]) -> Any:
    """The diagnosis whose heads lie beside it as columns, and what belongs to their figures in ``details``."""
    diagnosis = whole["diagnosis"]
    observations = [o for capture in diagnosis["captures"] for o in capture["observations"]]
    heads = unpacked(whole["heads"])
    for kind, found in (("heads", heads), ("kv_heads", unpacked(whole["kv_heads"]))):
        rest = iter(found)
        for observation in observations:
            observation[kind] = [head for _, head in zip(range(observation[kind]), rest, strict=False)]
    ranked = iter(whole["ranked"])
    for text in details:
        # The details first: zip would take one of ``ranked`` too many.
        for detail, index in zip(unpacked(json.loads(_unzipped(text))), ranked, strict=False):
            drift = detail.pop("drift")
            heads[index] |= detail
            for test in drift:
                heads[index]["bias"][test]["drift"] = drift[test]
    return diagnosis


def _unzipped(text: str) -> str:
    """What was gzipped and written in base64.

    Raises:
        ValueError: It is larger than any page makes it, or not there in full.
    """
    packed = base64.b64decode(text, validate=True)
    stream = zlib.decompressobj(zlib.MAX_WBITS | _GZIP)
    most = max(_RATIO * len(packed), _SMALL)
    found = stream.decompress(packed, most)
    if not stream.eof:
        raise ValueError(f"it ends too early, or unpacks to more than {most} bytes")
    return found.decode()


class _Element(HTMLParser):
    """Takes the text of the element with the diagnosis; what looks like one inside other text is none."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.text: str | None = None
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script" and dict(attrs).get("id") == ELEMENT and self.text is None:
            self._inside, self.text = True, ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.text = (self.text or "") + data

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "script"
