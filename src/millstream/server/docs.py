"""The page at /docs: what the server takes, made of its OpenAPI description and the field tables.

One plain page without scripts, so that it works offline and behind an API key.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from millstream.server.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    TOKENIZE_FIELDS,
    Field,
    FieldState,
)

TABLES: Mapping[str, Mapping[str, Field]] = {
    "/v1/chat/completions": CHAT_FIELDS,
    "/v1/completions": COMPLETION_FIELDS,
    "/tokenize": TOKENIZE_FIELDS,
    "/detokenize": DETOKENIZE_FIELDS,
}

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #8884; }
code { font: 0.92em ui-monospace, monospace; }
.refused td { opacity: .65; }
"""


def in_order(table: Mapping[str, Field]) -> list[tuple[str, Field]]:
    """The fields of a table, supported ones first."""
    states = list(FieldState)
    return sorted(table.items(), key=lambda item: states.index(item[1].state))


def docs_page(openapi: Mapping[str, Any]) -> str:
    """HTML, from the application's OpenAPI description."""
    title = f"{openapi['info']['title']} {openapi['info']['version']}"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<meta name=viewport content='width=device-width'><title>{escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{escape(title)}</h1><p>Machine-readable: <a href=openapi.json>openapi.json</a></p>",
        "<table><tr><th>Method<th>Path<th>What it does</tr>",
    ]
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            what = escape(operation.get("description", operation.get("summary", "")))
            parts.append(f"<tr><td>{escape(method.upper())}<td><code>{escape(path)}</code><td>{what}</tr>")
    parts.append("</table>")
    for path, table in TABLES.items():
        parts.append(f"<h2>POST <code>{escape(path)}</code></h2><table><tr><th>Field<th>State<th>Note</tr>")
        for name, field in in_order(table):
            css = field.state.name.lower()
            note = escape(field.note)
            parts.append(f"<tr class={css}><td><code>{escape(name)}</code><td>{escape(field.state)}<td>{note}</tr>")
        parts.append("</table>")
    return "".join(parts)
