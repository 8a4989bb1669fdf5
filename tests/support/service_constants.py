"""``python -m tests.support.service_constants JSON``: the accounting service with other constants.

The JSON object has their values by name, such as ``gpuspawner.service.duties.CLUSTER_SECONDS``.
"""

from __future__ import annotations

import importlib
import json
import sys

from gpuspawner.service.app import main

if __name__ == "__main__":
    for name, value in json.loads(sys.argv.pop(1)).items():
        module, _, constant = name.rpartition(".")
        owner = importlib.import_module(module)
        setattr(owner, constant, type(getattr(owner, constant))(value))
    main()
