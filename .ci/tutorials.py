# SPDX-License-Identifier: Apache-2.0
"""For the site: each executed notebook, without its hidden cells and its stderr, becomes a page of its tutorials."""

import pathlib
import re

from mkdocs.structure.files import File
from nbconvert import MarkdownExporter
from traitlets.config import Config

NOTEBOOKS = pathlib.Path(__file__).parents[1] / "notebooks"
# What is printed in columns stays as it is; sentences are wrapped.
TEMPLATE = """{% extends "markdown/index.md.j2" %}
{% block stream %}
{% if output.name == "stdout" %}
````{ .text .output .no-copy }
{%- for line in output.text.splitlines() %}
{{ line if "  " in line else line | wordwrap(110) }}
{%- endfor %}
````
{% endif %}
{% endblock %}
{% block data_png %}
![Figure drawn by the code above]({{ output.metadata.filenames["image/png"] }})
{% endblock %}
"""
HIDDEN = {"TagRemovePreprocessor": {"enabled": True, "remove_cell_tags": ["hide-cell"]}}


def on_files(files, config):
    exporter = MarkdownExporter(raw_template=TEMPLATE, config=Config(HIDDEN))
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        page, resources = exporter.from_filename(path, {"unique_key": path.stem})
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
        for name, figure in resources["outputs"].items():
            files.append(File.generated(config, f"notebooks/{name}", content=figure))


def on_page_markdown(markdown, **_):
    """On GitHub docs/ and notebooks/ are side by side; on the site notebooks/ is inside docs/."""
    markdown = re.sub(r"(\]\([^)]*)\.ipynb\b", r"\1.md", markdown)
    return markdown.replace("](../notebooks/", "](notebooks/").replace("](../docs/", "](../")
