"""Sphinx builds the documentation from this folder: `make docs`, warnings are errors."""

from __future__ import annotations

from importlib.metadata import version as version_of

project = "dsprof"
author = "the dsprof authors"
release = version = version_of("dsprof")
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"dsprof {release}"
html_copy_source = False
html_show_sphinx = False
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
highlight_language = "none"
nitpicky = True
html_static_path = ["_static"]
html_css_files = ["site.css"]
