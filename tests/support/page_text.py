"""What a person reads on a page."""

from __future__ import annotations

import html
import re


def text_of(page: str) -> str:
    """The words of a page, without its tags and scripts, on one line."""
    page = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())
