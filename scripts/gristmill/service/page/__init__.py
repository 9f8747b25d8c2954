"""The page at /: one HTML file with its style and script, which a hash in the Content-Security-Policy allows."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path


def read_page() -> tuple[bytes, str]:
    """The page and its Content-Security-Policy: its own script and style, and requests to this service only."""
    text = (Path(__file__).parent / "index.html").read_text("utf-8")
    sources = []
    for tag in ("script", "style"):
        found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert found is not None
        digest = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
        sources.append(f"{tag}-src 'sha256-{digest}'")
    rest = "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    return text.encode(), f"{rest}; frame-ancestors 'none'; {'; '.join(sources)}"
