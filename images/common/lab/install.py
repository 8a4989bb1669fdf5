"""Put our parts of JupyterLab into the Python that runs this: `python install.py`.

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
    for module in HERE.glob("gpuspawner_*.py"):
        shutil.copy(module, sysconfig.get_path("purelib"))
    command = Path(sysconfig.get_path("scripts"), "gpuspawner-run")
    command.write_text(
        f"#!{sys.executable}\nimport sys\nfrom gpuspawner_run import main\n\nsys.exit(main())\n"
    )
    command.chmod(0o755)


if __name__ == "__main__":
    main()
