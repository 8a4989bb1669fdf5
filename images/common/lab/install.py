"""Put the GPU item of JupyterLab into the Python that runs this: `python install.py`.

Only the standard library is used: this runs in any image with Python 3.8 or later.
"""

import shutil
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main():
    for folder in ("etc", "share"):
        shutil.copytree(HERE / folder, Path(sys.prefix, folder), dirs_exist_ok=True)
    shutil.copy(HERE / "gpuspawner_lab.py", sysconfig.get_path("purelib"))


if __name__ == "__main__":
    main()
