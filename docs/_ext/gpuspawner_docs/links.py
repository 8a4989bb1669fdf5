"""Names in the text: a setting, command or metric in code becomes a link to its entry.

The build warns of code that names what does not exist, or that would be refused.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

from .checks import SETTING, problems_in
from .commands import commands
from .operations import metrics
from .settings import configurables

logger = logging.getLogger(__name__)

OLD = ("changelog",)
"""Pages that may name what no longer exists."""


class LinkNames(SphinxPostTransform):
    """Turns names in code into links, and warns of those that do not exist."""

    default_priority = 400

    def run(self, **kwargs: Any) -> None:
        """Change the document."""
        docname = self.env.docname
        if docname in OLD:
            return
        for block in self.document.findall(nodes.literal_block):
            for problem in problems_in(block.astext(), block.get("language", "text")):
                logger.warning(problem, location=block, type="gpuspawner", subtype="name")
        for literal in list(self.document.findall(nodes.literal)):
            text = literal.astext()
            for problem in problems_in(text):
                logger.warning(problem, location=literal, type="gpuspawner", subtype="name")
            if self._inside(literal, nodes.reference, nodes.title, nodes.term):
                continue
            if (found := self._entry(text)) is not None:
                kind, name = found
                self._link(literal, kind, name)

    @staticmethod
    def _inside(node: nodes.Node, *kinds: type[nodes.Node]) -> bool:
        parent = node.parent
        while parent is not None:
            if isinstance(parent, kinds):
                return True
            parent = parent.parent
        return False

    def _entry(self, text: str) -> tuple[str, str] | None:
        if match := SETTING.match(text):
            return "setting", self._owner(*match.groups())
        program, *words = text.split()[:3] or [""]
        for count in range(len(words) if program == "gpuspawner" else 0, 0, -1):
            if (name := " ".join(words[:count])) in commands():
                return "command", name
        if text.startswith("gpuspawner_") and text in {each.name for each in metrics()}:
            return "metric", text
        return None

    def _owner(self, section: str, name: str) -> str:
        """Return the entry of a setting that a class has from another class."""
        objects = self.env.domains.standard_domain.objects
        if ("setting", f"{section}.{name}") in objects:
            return f"{section}.{name}"
        cls = configurables().get(section)
        for each in cls.__mro__ if cls else ():
            if ("setting", f"{each.__name__}.{name}") in objects:
                return f"{each.__name__}.{name}"
        return f"{section}.{name}"

    def _link(self, literal: nodes.literal, kind: str, name: str) -> None:
        target = self.env.domains.standard_domain.objects.get((kind, name))
        if target is None or self.app.builder.name not in ("html", "dirhtml"):
            return
        page, anchor = target
        made = make_refnode(self.app.builder, self.env.docname, page, anchor, literal.deepcopy())
        literal.replace_self(made)
