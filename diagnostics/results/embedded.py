"""The diagnosis inside an HTML report: found in its script element and unpacked."""

from __future__ import annotations

import base64
import json
import zlib
from html.parser import HTMLParser

from attn_diag.errors import InputError

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
        if isinstance(data, dict) and "gzip" in data:
            return _unpacked(base64.b64decode(data["gzip"], validate=True)).decode()
    except (ValueError, TypeError, RecursionError, zlib.error) as error:
        raise InputError(f"the diagnosis in this page is damaged ({error}); make the page anew") from error
    return found.text


def _unpacked(packed: bytes) -> bytes:
    """What was gzipped. Raises ValueError where it is larger than any page makes it, or not there in full."""
    stream = zlib.decompressobj(zlib.MAX_WBITS | _GZIP)
    most = max(_RATIO * len(packed), _SMALL)
    found = stream.decompress(packed, most)
    if not stream.eof:
        raise ValueError(f"it ends too early, or unpacks to more than {most} bytes")
    return found


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
