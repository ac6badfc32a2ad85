"""Sphinx settings. Pages that are made from code and data come from generate.py."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import generate  # noqa: E402

project = "meshshard"
author = "the meshshard developers"
copyright = author
release = generate.version()

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "**.ipynb_checkpoints", "generated/*_table.md"]
default_role = "code"  # `name` in a docstring is code

myst_enable_extensions = ["attrs_inline", "colon_fence", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # nbmake runs the notebooks; their stored pictures are shown

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_use_ivar = True
napoleon_attr_annotations = False
autodoc_type_aliases = {"Array": "Array"}

html_theme = "furo"
html_title = f"meshshard {release}"

generate.everything(HERE)


def setup(app):
    app.connect(
        "autodoc-process-docstring", generate.add_parameters, priority=400
    )  # before napoleon
    app.connect("autodoc-process-docstring", generate.keep_drawings)
    app.connect("autodoc-skip-member", generate.skip_tuple_fields)
