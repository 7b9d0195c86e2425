"""What the reports have in common: a page in one file without scripts or links, and tables that scroll. Stdlib only."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

_STYLE: Final = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:900px;margin:2em auto;padding:0 1em;color:#222;"
    "overflow-wrap:anywhere}"
    # A table wider than the page scrolls by itself; broken names would be a letter wide.
    ".wide{overflow-x:auto;margin:1em 0}table{border-collapse:collapse;overflow-wrap:normal}"
    "td,th{padding:.25em .7em;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap}"
    "td:first-child,th:first-child{text-align:left}.legend span{margin-right:1.2em;font-size:13px}"
    ".legend i{display:inline-block;width:.8em;height:.8em;margin-right:.35em}h3{margin:1.2em 0 .2em}"
    ".warn{background:#fff3d6;padding:.5em .8em}svg{max-width:100%;height:auto}"
)


def page(title: str, body: Sequence[str]) -> str:
    """A document. ``title`` is text, ``body`` markup."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Of texts."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
