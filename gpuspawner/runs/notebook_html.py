"""A notebook as HTML, made by nbconvert in a process of its own.

A member wrote the notebook. If its conversion hangs or takes too much memory, only that process is
affected: this file, run as a program with the notebook as its input.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from contextlib import suppress

LARGEST = 20 << 20
"""The most bytes of a notebook that is converted."""
LARGEST_HTML = 100 << 20
SECONDS = 60
MEMORY_BYTES = 2 << 30

AT_ONCE = asyncio.Semaphore(2)

TEMPLATE = """
{%- extends "lab/index.html.j2" -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block jupyter_widgets -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
"""
"""nbconvert's own template without what it loads from other sites: scripts do not run."""


class NotRendered(Exception):
    """A file is not a notebook, or converting it takes too much time or memory."""


async def render(notebook: bytes) -> bytes:
    """Return a notebook as HTML, as untrusted as the notebook. Raises NotRendered."""
    async with AT_ONCE:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",  # ignores the working directory and the environment
            __file__,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PATH": os.defpath, "HOME": "/nonexistent"},
        )
        try:
            html, _ = await asyncio.wait_for(process.communicate(notebook), SECONDS)
        except asyncio.TimeoutError:
            raise NotRendered from None
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode or not html:
        raise NotRendered
    return html


def main() -> int:
    """Convert the notebook in the standard input; the exit status is 1 if that fails."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    # Imported here, so that the limits apply to them and the service starts a second faster.
    import nbformat
    from jinja2 import DictLoader
    from nbconvert.exporters import HTMLExporter

    notebook = nbformat.reads(sys.stdin.buffer.read().decode(), as_version=4)
    ours = DictLoader({"run.html.j2": TEMPLATE})
    exporter = HTMLExporter(extra_loaders=[ours], template_file="run.html.j2")
    html, _ = exporter.from_notebook_node(notebook)
    encoded = html.encode(errors="replace")
    if len(encoded) > LARGEST_HTML:
        return 1
    sys.stdout.buffer.write(encoded)
    return 0


if __name__ == "__main__":
    sys.exit(main())
