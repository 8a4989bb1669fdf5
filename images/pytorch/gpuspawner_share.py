"""Keeps PyTorch within a share of a GPU: a hint, which a program may change.

    python3 gpuspawner_share.py

makes each Python of this environment do so when it starts, if its PyTorch knows the option. Only
the standard library is used: this runs with Python 3.8 or later.
"""

import os
import shutil
import sysconfig
from importlib import metadata

FIRST = (2, 10)
"""The first PyTorch that knows the option: others stop with an error at the first use of a GPU."""

PART = 0.9
"""The part of a share that PyTorch may allocate; the rest is for the CUDA context."""

OPTION = "per_process_memory_fraction"


def limit(variables):
    """Set PyTorch's variable, if the server has a share of a GPU and nothing else was chosen."""
    share = variables.get("GPUSPAWNER_GPU_SHARE")
    name = "PYTORCH_ALLOC_CONF"
    if "PYTORCH_CUDA_ALLOC_CONF" in variables:  # the old name, which goes first
        name = "PYTORCH_CUDA_ALLOC_CONF"
    chosen = variables.get(name, "")
    if share and OPTION not in chosen:
        fraction = f"{OPTION}:{float(share) * PART:.3f}"
        variables[name] = f"{chosen},{fraction}" if chosen else fraction


def install():
    """Have Python run this module when it starts."""
    version = metadata.version("torch")
    if tuple(int(part) for part in version.split(".")[:2]) < FIRST:
        print(f"PyTorch {version} has no option that limits its memory")
        return
    folder = sysconfig.get_path("purelib")
    shutil.copy(__file__, folder)
    with open(os.path.join(folder, "gpuspawner_share.pth"), "w", encoding="utf-8") as file:
        file.write("import gpuspawner_share\n")
    print(f"PyTorch {version} keeps within a share of a GPU")


if __name__ == "__main__":
    install()
else:
    limit(os.environ)
