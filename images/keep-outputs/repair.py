"""Repair jupyter-server-nbmodel 0.2.9, which counts letters where the document counts bytes.

Without it, a line that is overwritten and is not ASCII, such as a progress bar of tqdm, stops the
server. The repair fails if the code has changed: then check whether it is still needed.
"""

from importlib.util import find_spec
from pathlib import Path

WRONG = "del previous_text[shared:]\n"
RIGHT = "del previous_text[len(actual_text[:shared].encode()):]\n"


def main():
    spec = find_spec("jupyter_server_nbmodel.actions")
    file = Path(spec.origin)
    text = file.read_text(encoding="utf-8")
    if text.count(WRONG) != 1:
        raise SystemExit(f"{file} has changed: check whether this repair is still needed")
    file.write_text(text.replace(WRONG, RIGHT), encoding="utf-8")


if __name__ == "__main__":
    main()
