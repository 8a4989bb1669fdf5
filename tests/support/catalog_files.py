"""A catalog with all that its pages show, and with what must not run on them."""

from __future__ import annotations

import json

EVIL = "<script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"

CATALOG = f"""
environments:
  - slug: torch
    display_name: PyTorch
    summary: Deep learning, with everything for a course.
    description: "Open `train.ipynb` first.\\n\\n- one\\n- two\\n\\n[Docs](https://pytorch.org/docs)"
    image: "torch:2.5"
    default: true
    logo: torch.svg
    frameworks: {{PyTorch: "2.5.1", CUDA: "12.4"}}
    devices: {{default: 1, max: 2}}
    hours: {{default: 2, max: 8}}
    mem_limit: 16G
    profile_options:
      room:
        display_name: Memory
        choices:
          usual: {{display_name: 16 GB}}
          more: {{display_name: 64 GB, mem_limit: 64G}}
    maintainer: The lab
    tested_on: 2026-10-01
    packages: packages.txt
    changes: changes.md
    sample_notebook: sample.ipynb
    links: {{The course: "https://lab.example/course"}}
  - slug: jax
    display_name: JAX
    summary: Arrays and gradients.
    image: x
    frameworks: {{JAX: "0.4.35"}}
    models: [T4]
  - slug: plain
    display_name: JupyterLab
    summary: Notes and files.
    image: x
    devices: {{max: 0}}
  - slug: evil
    display_name: {json.dumps("Evil " + EVIL)}
    summary: {json.dumps(EVIL)}
    description: {json.dumps(EVIL + " [x](javascript:alert(1))")}
    maintainer: {json.dumps(EVIL)}
    frameworks: {{{json.dumps(EVIL)}: {json.dumps(EVIL)}}}
    links: {{{json.dumps(EVIL)}: "https://example.org/?<script>document.title='ran'"}}
    packages: evil.txt
    changes: evil.md
    sample_notebook: evil.ipynb
    image: x
    devices: {{max: 0}}
    profile_options:
      o:
        display_name: {json.dumps(EVIL)}
        choices: {{x: {{display_name: {json.dumps(EVIL)}}}}}
  - slug: staff
    display_name: For the staff
    image: x
    allowed_groups: [staff]
"""


def notebook(text: str, code: str, output: str) -> str:
    """A notebook with a cell of text, and one of code with its output."""
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": output},
        {"output_type": "display_data", "metadata": {}, "data": {"text/html": output}},
    ]
    cells = [
        {"cell_type": "markdown", "source": text},
        {"cell_type": "code", "source": code, "outputs": outputs},
    ]
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells})


FILES = {
    "catalog.yaml": CATALOG,
    "packages.txt": "torch==2.5.1\nnumpy==2.1.3\n",
    "changes.md": "- PyTorch 2.5.1\n",
    "sample.ipynb": notebook("# Train a model", "print(40 + 2)", "42\n"),
    "evil.txt": f"{EVIL}==1.0\n",
    "evil.md": f"{EVIL}\n\n[x](javascript:document.title='ran')",
    "evil.ipynb": notebook(EVIL, EVIL, EVIL),
    "torch.svg": '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9">'
    '<rect width="9" height="9" fill="#c34"/><script>alert(1)</script></svg>',
}
