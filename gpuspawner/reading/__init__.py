"""What an admin wrote in a file, read strictly: every mistake names its line and the remedy."""

from .origin import Origin, shown
from .section import Section, suggest
from .yaml_text import read_yaml

__all__ = ["Origin", "Section", "read_yaml", "shown", "suggest"]
