# SPDX-License-Identifier: Apache-2.0
"""Tables as text for a terminal and as HTML for a notebook."""

import html
import itertools
from collections.abc import Callable, Sequence

_MOST_ROWS = 30  # of a table in one piece
_STYLE = (
    "<style>.jaxquant {overflow-x: auto} .jaxquant table {border-collapse: collapse} "
    ".jaxquant th, .jaxquant td {text-align: left; padding: 2px 8px; white-space: nowrap; border-bottom: 1px solid "
    "#8884} .jaxquant th {cursor: pointer} .jaxquant td.float {color: #c2410c}</style>"
)
_SORT = (  # by the column whose header is clicked, as numbers where both are; again, the other way round
    "const h = event.target.closest('th'); if (h) { const i = h.cellIndex, s = this.dataset.by === '' + i ? -1 : 1; "
    "this.dataset.by = s > 0 ? i : ''; const v = r => r.cells[i].innerText.replace(/,/g, ''); "
    "[...this.rows].slice(1).sort((a, b) => { const d = parseFloat(v(a)) - parseFloat(v(b)); "
    "return s * (isNaN(d) ? v(a).localeCompare(v(b)) : d); }).forEach(r => r.parentNode.append(r)); }"
)


def as_text(header: Sequence[str], rows: Sequence[Sequence[str]], last: Sequence[str]) -> str:
    """Columns of equal width, and lines below."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    line = lambda row: "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    return "\n".join([line(header), *map(line, rows), *last])


def as_html(
    header: Sequence[str], rows: Sequence[Sequence[str]], last: Sequence[str],
    is_float: Callable[[Sequence[str]], bool],
) -> str:  # fmt: skip
    """A table, by the first two segments of the names in the first column where there are many rows; rows that are left
    in float have a colour, and a click on a header sorts."""
    cell = lambda tag, text, kind="": f"<{tag}{kind}>{html.escape(text)}</{tag}>"
    head = "<tr>" + "".join(cell("th", text) for text in header) + "</tr>"

    def table(rows: Sequence[Sequence[str]]) -> str:
        pale = [' class="float"' if is_float(row) else "" for row in rows]
        lines = ("".join(cell("td", text, p) for text in row) for row, p in zip(rows, pale, strict=True))
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        return f'<table onclick="{_SORT}">{head}{body}</table>'

    if len(rows) <= _MOST_ROWS:
        body = table(rows)
    else:
        module = lambda row: "/".join(row[0].split(":")[0].split("/")[:2])
        parts = []
        for name, group in itertools.groupby(rows, module):
            of = list(group)
            quantized = sum(not is_float(row) for row in of)
            summary = html.escape(f"{name or '(no name)'}: {len(of)} rows, {quantized} quantized")
            parts.append(f"<details><summary>{summary}</summary>{table(of)}</details>")
        body = "".join(parts)
    return f'<div class="jaxquant">{_STYLE}{body}{"".join(f"<p>{html.escape(line)}</p>" for line in last)}</div>'
