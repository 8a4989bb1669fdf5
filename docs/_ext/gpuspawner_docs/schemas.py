"""JSON Schema in words, and the files that admins write: the catalog and the cluster file."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .page import Generated, plain

Schema = Mapping[str, Any]
Named = Callable[[str], str]


def type_of(schema: Schema, named: Named = lambda name: name) -> str:
    """Return the type in words; ``named`` says what stands for a type that has a name."""
    if ref := schema.get("$ref"):
        return named(ref.rpartition("/")[2])
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return ", or ".join(dict.fromkeys(type_of(each, named) for each in schema[word]))
    if "allOf" in schema:
        return " and ".join(type_of(each, named) for each in schema["allOf"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return "one of " + ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    kind = schema.get("type", "any value")
    if kind == "array":
        return f"list of {_several(type_of(schema.get('items', {}), named))}"
    if kind == "object":
        inside = schema.get("additionalProperties")
        if isinstance(inside, dict) and inside:
            return f"mapping of names to {_several(type_of(inside, named))}"
        return "mapping"
    words = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "true or false",
    }
    text = {"date-time": "time", "date": "date"}.get(schema.get("format", ""), "")
    return text or words.get(kind, str(kind))


def _several(kind: str) -> str:
    return {"mapping": "mappings", "text": "texts", "whole number": "whole numbers"}.get(kind, kind)


def limits_of(schema: Schema) -> str:
    """Return limits in words, or an empty string."""
    words = {
        "minimum": "at least {:,}",
        "exclusiveMinimum": "more than {:,}",
        "maximum": "at most {:,}",
        "exclusiveMaximum": "less than {:,}",
        "minItems": "at least {:,} entries",
        "maxItems": "at most {:,} entries",
        "minProperties": "at least {:,} entries",
        "maxProperties": "at most {:,} entries",
        "maxLength": "at most {:,} characters",
    }
    found = [text.format(schema[key]) for key, text in words.items() if schema.get(key)]
    return ", ".join(text.replace("1 entries", "1 entry") for text in found)


def refs_of(schema: Any) -> Iterator[str]:
    """Yield the names of the types that a schema refers to."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2]
        for value in schema.values():
            yield from refs_of(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from refs_of(value)


def rows_of(
    schema: Schema, named: Named = lambda name: name, *, sent: bool = False
) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each field of an object: name, type and meaning.

    ``sent``: say of a field that it must be there. An answer has all of its fields.
    """
    required = set(schema.get("required", ())) if sent else ()
    for name, value in schema.get("properties", {}).items():
        told = plain(value.get("description", ""))
        if examples := value.get("examples"):
            told += f" Example: `{json.dumps(examples[0], ensure_ascii=False)}`."
        kind = type_of(value, named)
        limits = limits_of(value)
        yield (
            f"`{name}`" + (" (required)" if name in required else ""),
            f"{kind}, {limits}" if limits else kind,
            told.strip(),
        )


class _File(Generated):
    """A section for each mapping of a file, and one for each of its keys."""

    file = ""

    @abstractmethod
    def schema(self) -> Schema:
        """Return the file's JSON Schema."""

    def markdown(self) -> Iterator[str]:
        """Yield the sections."""
        whole = self.schema()
        yield from self._mapping(whole, whole, self.file, "The file")

    def _mapping(self, whole: Schema, schema: Schema, path: str, title: str) -> Iterator[str]:
        yield from self.heading(1, "key", path, title)
        yield plain(schema.get("description", "").replace("``", "`"))
        yield ""
        for key, value in schema["properties"].items():
            yield from self._key(key, value, path, key in schema.get("required", ()))
        for key, value in schema["properties"].items():
            for name in dict.fromkeys(refs_of(value)):
                inside = f"{path}.{key}"
                shown = inside.partition(".")[2]
                yield from self._mapping(whole, whole["$defs"][name], inside, f"In `{shown}`")

    def _key(self, key: str, value: Schema, path: str, required: bool) -> Iterator[str]:
        if next(refs_of(value), ""):
            # The mapping below has the anchor of its own name; the key only leads there.
            yield from ("", f"## `{key}`", "")
        else:
            yield from self.heading(2, "key", f"{path}.{key}", f"`{key}`")
        yield plain(value.get("description", "").replace("``", "`"))
        facts = [f"Type: {type_of(value, lambda name: 'mapping')}"]
        facts += [limits] if (limits := limits_of(value)) else []
        line = ", ".join(facts) + ("; required" if required else "")
        if "default" in value:
            line += f". Default: `{json.dumps(value['default'])}`"
        if examples := value.get("examples"):
            line += f". Example: `{examples[0]}`"
        yield from ("", f"{line}.", "")


class CatalogKeys(_File):
    """``{catalog-keys}``: the keys of the catalog file."""

    file = "catalog"

    def schema(self) -> Schema:
        """Return the schema that ``gpuspawner catalog schema`` prints."""
        from gpuspawner.catalog import models, parser

        self.uses(models, parser)
        return parser.schema()


class ClusterKeys(_File):
    """``{cluster-keys}``: the keys of the cluster file."""

    file = "cluster"

    def schema(self) -> Schema:
        """Return the schema of the file's models."""
        from gpuspawner.core.config_models import json_schema
        from gpuspawner.slurm import cluster

        self.uses(cluster)
        return json_schema(cluster.ClusterFile, "cluster.yaml")
