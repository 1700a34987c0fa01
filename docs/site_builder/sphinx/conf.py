"""How Sphinx makes pages of the tree that the builder laid out."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

project = "hodiff"
author = "The hodiff developers"
copyright = author
html_title = "hodiff"

extensions = ["myst_nb", "sphinx_design", "sphinx_copybutton", "mathml"]

# Markdown as GitHub shows it, with formulas and links to sections; directives in what the builder writes.
myst_enable_extensions = ["attrs_inline", "colon_fence", "dollarmath", "fieldlist"]
myst_dmath_double_inline = True
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]
highlight_language = "none"

# Notebooks are shown as they were committed.
nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, object] = {}

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_math_renderer = "mathml"
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
pygments_style = "friendly"
pygments_dark_style = "monokai"

# What a reader copies is code, without prompts and output.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
