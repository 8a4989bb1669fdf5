"""The last step of an image: everything compiled, and a list of what is inside.

    python3 seal.py [--compile FOLDER ...] FILE

``FILE`` gets a bill of materials in CycloneDX 1.5: the Python packages that this interpreter
sees, and Debian's. Without a date and a serial number, so that the same image gives the same
file. Only the standard library is used: this runs in any image with Python 3.8 or later.
"""

import argparse
import compileall
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from urllib.parse import quote


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", nargs="+", default=[], metavar="FOLDER")
    parser.add_argument("file", metavar="FILE")
    arguments = parser.parse_args()
    compile_all(arguments.compile)
    parts = python_packages() + debian_packages()
    write(arguments.file, parts)
    print(f"{arguments.file}: {len(parts)} packages")


def compile_all(folders):
    """Bytecode for each module that has none yet: a server's first import then only reads.

    What cannot be compiled (templates, code for other versions of Python) is no failure.
    """
    for folder in folders:
        compileall.compile_dir(folder, quiet=2, workers=os.cpu_count())


def python_packages():
    found = {}
    for distribution in metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        if name and version:
            found.setdefault(normal(name), (name, version, distribution.metadata["License"]))
    parts = []
    for key, (name, version, terms) in sorted(found.items()):
        part = component("pypi", key, version, name)
        if terms and len(terms) <= 60:  # some put the whole text there
            part["licenses"] = [{"license": {"name": terms.strip()}}]
        parts.append(part)
    return parts


def debian_packages():
    words = ["dpkg-query", "-W", "-f", "${db:Status-Abbrev}\t${Package}\t${Version}\n"]
    try:
        told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []  # not made from Debian or Ubuntu
    lines = [line.split("\t") for line in told.splitlines()]
    return [
        component("deb/debian", name, version) for state, name, version in lines if "i" in state
    ]


def component(kind, key, version, name=""):
    reference = f"pkg:{kind}/{key}@{quote(version, safe='')}"
    return {
        "type": "library",
        "bom-ref": reference,
        "name": name or key,
        "version": version,
        "purl": reference,
    }


def normal(name):
    """A package's name as indexes compare it."""
    return "-".join(name.lower().replace("_", "-").replace(".", "-").split("-"))


def write(file, parts):
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {"type": "container", "name": "image"},
            "properties": [{"name": "python", "value": platform.python_version()}],
        },
        "components": parts,
    }
    os.makedirs(os.path.dirname(os.path.abspath(file)), exist_ok=True)
    with open(file, "w", encoding="utf-8") as stream:
        json.dump(bill, stream, indent=1)
        stream.write("\n")


if __name__ == "__main__":
    sys.exit(main())
