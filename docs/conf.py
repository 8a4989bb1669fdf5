"""Sphinx's settings for the documentation: `make docs` builds it into docs/_build."""

import sys
from pathlib import Path

import gpuspawner

sys.path.insert(0, str(Path(__file__).resolve().parent / "_ext"))

project = "gpuspawner"
author = "the gpuspawner contributors"
project_copyright = "2026, the gpuspawner contributors"
version = release = gpuspawner.__version__

extensions = [
    *("sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"),
    *("sphinx_copybutton", "sphinxext.rediraffe", "gpuspawner_docs"),
]
# The names of Python's own types lead to no page: pages refer to nothing on other hosts.
nitpick_ignore_regex = [("py:.*", ".*")]
rediraffe_redirects = "redirects.txt"
exclude_patterns = ["_build", "_ext", "_static"]
source_suffix = {".md": "markdown"}
nitpicky = True
highlight_language = "text"
smartquotes_action = "qe"  # quotes and ellipses; options keep their two dashes
pygments_style = "sphinx"

myst_enable_extensions = ["colon_fence", "deflist", "substitution"]
myst_heading_anchors = 3
myst_substitutions = {"version": version}

copybutton_prompt_text = r"\$ |# "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True
copybutton_remove_prompts = True

# The page needs nothing from anywhere else: no fonts, icons, pictures or search of other hosts.
html_theme = "jupyterhub_sphinx_theme"
html_title = f"gpuspawner {version}"
LOGO = "../gpuspawner/web/static/gpu.svg"
html_logo = LOGO
html_favicon = LOGO
ogp_social_cards = {"enable": False}
html_static_path = ["_static"]
html_css_files = ["docs.css"]
html_context = {"default_mode": "auto"}
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "gpuspawner", "image_light": LOGO, "image_dark": LOGO},
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],  # without the links to other sites that the theme adds
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "use_edit_page_button": False,
    "footer_start": ["copyright"],
    "footer_center": [],
    "footer_end": [],
}
