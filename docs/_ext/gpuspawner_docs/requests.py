"""The fields of a request, and the arguments of ``add_services``."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator

from sphinx.pycode import ModuleAnalyzer

from .page import Generated, block, plain, table

TYPES = {"str": "text", "int": "whole number", "float": "number", "bool": "yes or no"}


class RequestFields(Generated):
    """``{request-fields}``: the fields of ``user_options``."""

    def markdown(self) -> Iterator[str]:
        """Yield the table."""
        from gpuspawner.spawners import options

        self.uses(options)
        told = ModuleAnalyzer.for_module(options.__name__).find_attr_docs()
        rows = []
        for each in dataclasses.fields(options.FormChoice):
            kind = str(each.type).partition(" |")[0]
            words = " ".join(" ".join(told.get(("FormChoice", each.name), ())).split())
            shown = TYPES.get(kind, "list of texts")
            rows.append((f"`{each.name}`", shown, plain(words.replace("``", "`"))))
        yield from table(("Field", "Type", "Meaning"), rows)


class AddServices(Generated):
    """``{add-services}``: the function's signature and arguments."""

    def markdown(self) -> Iterator[str]:
        """Yield the signature, then a table of the arguments."""
        from gpuspawner import config

        self.uses(config)
        function = config.add_services
        found = inspect.signature(function)
        bare = [each.replace(annotation=each.empty) for each in found.parameters.values()]
        signature = found.replace(parameters=bare, return_annotation=found.empty)
        yield from block("text", f"gpuspawner.add_services{signature}")
        words = inspect.cleandoc(function.__doc__ or "")
        introduction, _, rest = words.partition("\nArgs:\n")
        yield from (plain(introduction.partition("\n\n")[0].replace("``", "`")), "")
        arguments = inspect.cleandoc(rest.partition("\nRaises:\n")[0])
        rows = (
            (f"`{name}`", plain(" ".join(text.split()).replace("``", "`")))
            for name, text in re.findall(r"^(\w+): (.*(?:\n .*)*)", arguments, re.M)
        )
        yield from table(("Argument", "Meaning"), rows)
