"""Models of files written by admins: values, defaults and the JSON Schema in one place.

A mistake is one ConfigError that names the file, the line, the key, what is wrong and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticCustomError, core_schema

from .config_files import KeyPath, Origin, shown, suggest
from .errors import ConfigError

MOST_WHOLE = 1_000_000
MOST_NUMBER = 10**15

_SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
_SIZE_TEXT = r"^(?=.*[1-9])\s*[0-9]{1,15}(?:\.[0-9]+)?\s*(?:[KMGTkmgt][Ii]?)?[Bb]?\s*$"
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_LEAST_SIZE = 1_000_000
_MOST_SIZE = 2**60

Schema = dict[str, Any]


class ConfigModel(BaseModel):
    """A mapping of known keys. A docstring below a key is its description in the schema."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, data: Any, info: ValidationInfo) -> Any:
        """A misspelt key is named before the one that is missing for it."""
        if info.context is not None and isinstance(data, dict):
            for key, value in data.items():
                if key not in cls.model_fields:
                    known = suggest(str(key), cls.model_fields)
                    raise mistake(f"has an unknown key {shown(key)}. {known}", key)
                if value is None:
                    raise PydanticCustomError("no_value", "has no value", {"path": (key,)})
        return data


def mistake(message: str, *path: str | int) -> PydanticCustomError:
    """Return what a validator raises about the keys at ``path`` in its value.

    The message is the end of a sentence that begins with the value.
    """
    return PydanticCustomError("mistake", "{message}", {"message": message, "path": path})


M = TypeVar("M", bound=ConfigModel)


def read_model(
    model: type[M], data: object, origin: Origin, name: str, nouns: Mapping[str, str]
) -> M:
    """Return the data as the model makes it. Raises ConfigError for the first mistake.

    Args:
        model: Of the whole file.
        data: What stands in it.
        origin: The file, and the line of each value.
        name: What people call the whole, such as ``the catalog``.
        nouns: What they call an entry of the list or mapping under a key.
    """
    try:
        return model.model_validate(data, context=origin)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
    raise _Refusal(data, origin, name, nouns).of(found["loc"], found["type"], found)


_ENDS = {
    "bool_type": "is {shown}. Write true or false.",
    "dict_type": "is {shown}, not a mapping. Write it as 'key: value' lines.",
    "finite_number": "is {shown}, not a usable number. Write one such as 2.5.",
    "float_type": "is {shown}, not a usable number. Write one such as 2.5.",
    "greater_than": "is {shown}, not above {gt}. Write more.",
    "greater_than_equal": "is {shown}; {ge} is the least. Write more.",
    "int_type": "is {shown}, not a whole number. Write one such as 1.",
    "less_than": "is {shown}, not below {lt}. Write less.",
    "less_than_equal": "is {shown}; {le} is the most. Write less.",
    "list_type": "is {shown}, not a list. Begin each entry with '- '.",
    "literal_error": "is {shown}. Write {expected}.",
    "model_type": "is {shown}, not a mapping. Write it as 'key: value' lines.",
    "no_value": "has no value. Write one, or leave the key out.",
    "string_type": "is {shown}, not text. Put it in quotes.",
    "too_long": "has {length} entries; at most {max_length} are allowed. Remove some.",
    "too_short": "is empty. Write at least one entry.",
    "value_error": "{error}",
}
"""What a sentence about a value ends with, by pydantic's name of the mistake."""


@dataclass(frozen=True)
class _Refusal:
    """Makes sentences of what pydantic says."""

    data: object
    origin: Origin
    name: str
    nouns: Mapping[str, str]

    def of(self, path: KeyPath, kind: str, found: Mapping[str, Any]) -> ConfigError:
        context = found.get("ctx", {})
        about = (*path, *context.get("path", ()))
        if kind == "mistake":
            return self.origin.error(about, f"{self.label(path)} {context['message']}")
        if kind == "missing":
            return self.origin.error(path, f"{self.label(path[:-1])} has no '{path[-1]}'. Add it.")
        value = found["input"]
        if value is None:
            kind = "no_value"
        end = _ENDS.get(kind, "is {shown}, which cannot be used. Write it otherwise.")
        parts = {key: _plain(part) for key, part in context.items()}
        length = len(value) if isinstance(value, (Mapping, list)) else 0
        words = end.format(**{**parts, "shown": shown(value), "length": length})
        if path[-1:] == ("[key]",):
            *outer, key, _ = path
            inside = self.label(tuple(outer))
            return self.origin.error((*outer, key), f"the name {shown(key)} in {inside} {words}")
        return self.origin.error(about, f"{self.label(about)} {words}")

    def label(self, path: KeyPath) -> str:
        """What people call the value at ``path``, such as ``'hours' of environment 'base'``."""
        if not path:
            return self.name
        *outer, key = path
        noun = self.nouns.get(str(outer[-1])) if outer else None
        if noun is None:
            return f"'{key}' of {self.label(tuple(outer))}"
        if not isinstance(key, int):
            return f"{noun} {key!r}"
        value: Any = self.data
        for step in path:
            value = value[step]
        slug = value.get("slug") if isinstance(value, dict) else None
        number = repr(slug) if isinstance(slug, str) else str(key + 1)
        return f"{noun} {number}" + (f" of {self.label(tuple(outer[:-1]))}" if outer[1:] else "")


def _plain(number: Any) -> Any:
    """8760, and not 8760.0."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


# Kinds of values. A check raises ValueError with the end of a sentence that begins with the key.


@dataclass(frozen=True, eq=False)
class Checked:
    """Annotation of a value that a function makes of what is written, with its JSON Schema."""

    check: Callable[[Any], Any]
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Schema:
        return dict(self.schema)


def matching(pattern: str, remedy: str, noun: str = "", *, is_key: bool = False) -> Checked:
    """Annotate text that has to fit a pattern, without the white space around it unless a key."""

    def check(value: object) -> str:
        found = value if is_key and isinstance(value, str) else text(value)
        if not re.fullmatch(pattern, found):
            what = f", not {noun}" if noun else ""
            wrong = "cannot be used" if is_key else f"is {shown(found)}{what}"
            raise ValueError(f"{wrong}. {remedy}")
        return found

    # Python's $ also matches before a last line break, which JavaScript's does not.
    begin, end = ("^", r"$(?!\n)") if is_key else (r"^\s*", r"\s*$")
    return Checked(check, text_schema(f"{begin}(?:{pattern}){end}"))


def text_schema(pattern: str, **more: Any) -> Schema:
    """Return the JSON Schema of text."""
    return {"type": "string", "pattern": pattern, **more}


def list_schema(item: Schema, *, least: int = 0) -> Schema:
    """Return the JSON Schema of a list of different items."""
    return {"type": "array", "items": item, "uniqueItems": True, "minItems": least}


def text(value: object) -> str:
    """Text that is not empty, without the white space around it."""
    if not isinstance(value, str):
        raise ValueError(f"is {shown(value)}, not text. Put it in quotes.")
    if not value.strip():
        raise ValueError("is empty. Write something, or leave the key out.")
    return value.strip()


def texts(value: object) -> tuple[str, ...]:
    """A list of different, non-empty texts."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"is {shown(value)}, not a list. Write it as [one, another].")
    found: list[str] = []
    for item in value:
        if not isinstance(item, str) or not item.strip():
            raise ValueError(f"holds {shown(item)}, which is not text. Put it in quotes.")
        if item.strip() in found:
            raise ValueError(f"names {item.strip()!r} twice. Keep one of them.")
        found.append(item.strip())
    return tuple(found)


def _size(base: int) -> Checked:
    def check(value: object) -> int:
        match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
        count = value if type(value) is int else 0
        if match and not (match[3] and not match[2]):
            factor = (1024 if match[3] else base) ** _POWERS[match[2].upper()]
            count = int(float(match[1]) * factor)
        if count <= 0:
            raise ValueError(f"is {shown(value)}, not a size. Write one such as 8G or 512M.")
        if count < _LEAST_SIZE:
            raise ValueError(f"is {shown(value)}: less than 1M. Write a unit, such as 8G or 512M.")
        if count > _MOST_SIZE:
            raise ValueError(f"is {shown(value)}: more than any machine has. Write a smaller size.")
        return count

    written = [{"type": "integer", "minimum": _LEAST_SIZE}, text_schema(_SIZE_TEXT)]
    return Checked(check, {"anyOf": written, "examples": ["8G"]})


parse_size = _size(1024).check
"""Return a :data:`Size` as bytes. Raises ValueError with the end of a sentence."""

Size = Annotated[int, _size(1024)]
"""Bytes, or text with a unit in powers of 1024 as in JupyterHub: ``8G``."""

DeviceMemory = Annotated[int, _size(1000)]
"""Bytes, or text with a unit as makers of GPUs count (``24G``: 24 x 1000^3).

A 24 GB card reports a little less than 24 x 1024^3 bytes, and ``24G`` has to mean it. ``Gi``
counts in powers of 1024.
"""

Names = Annotated[tuple[str, ...], Checked(texts, list_schema(text_schema(r"\S")))]
Whole = Annotated[int, Field(ge=0, le=MOST_WHOLE)]
Positive = Annotated[float, Field(gt=0, lt=MOST_NUMBER, allow_inf_nan=False)]


# The JSON Schema.


def json_schema(model: type[ConfigModel], title: str) -> Schema:
    """The schema of a file, from which editors complete it and show what a key means."""
    found = model.model_json_schema(schema_generator=_SchemaGenerator)
    return {"$schema": _SchemaGenerator.schema_dialect, **found, "title": title}


class _SchemaGenerator(GenerateJsonSchema):
    """Says what may be written: no nulls, and names of a mapping that fit their pattern."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def nullable_schema(self, schema: core_schema.NullableSchema) -> Schema:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> Schema:
        found = super().default_schema(schema)
        if not found.get("default", True):  # an empty default could not be written
            del found["default"]
        return found

    def dict_schema(self, schema: core_schema.DictSchema) -> Schema:
        found = {
            "type": "object",
            "propertyNames": self.generate_inner(schema["keys_schema"]),
            "additionalProperties": self.generate_inner(schema["values_schema"]),
        }
        self.update_with_validations(found, schema, self.ValidationsMapping.object)
        return found
