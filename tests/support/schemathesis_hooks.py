"""What ``schemathesis.toml`` cannot say: no body that is made up is too large for the service.

The size of a body is no part of a schema. Other tests send larger ones.
"""

from __future__ import annotations

import json
from typing import Any

import schemathesis

from gpuspawner.web.api import LONGEST


@schemathesis.hook
def filter_body(_context: Any, body: Any) -> bool:
    """Return True for a body that the service reads."""
    return len(json.dumps(body, default=str)) <= LONGEST
