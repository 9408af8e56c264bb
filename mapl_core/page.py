"""Pages that stand alone: one HTML file without scripts or network, for phones, desktops, light and dark."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --soft: #57606a; --line: #d0d7de; --band: #f3f5f7;
  --link: #0550ae; --yes: #116329; --no: #a40e26; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #14181d; --soft: #9da7b3; --line: #3a424c; --band: #1d232a; --link: #79c0ff;
    --yes: #7ee787; --no: #ff9492; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 0.5rem; padding-top: 0.5rem; border-top: 1px solid var(--line); }
p, ul, dl { max-width: 48rem; }
a { color: var(--link); }
a:focus-visible, summary:focus-visible, .scroll:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.skip { position: absolute; left: -100rem; }
.skip:focus { position: static; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.25rem 1rem; list-style: none; padding: 0; }
nav a { display: inline-block; padding: 0.35rem 0; }
.soft { color: var(--soft); font-size: 0.9rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; margin: 0.75rem 0; }
table { border-collapse: collapse; font-size: 0.84rem; font-variant-numeric: tabular-nums; min-width: 100%; }
caption { text-align: left; padding: 0.5rem 0.7rem; font-weight: 600; }
th, td { text-align: left; vertical-align: top; padding: 0.4rem 0.5rem; border-top: 1px solid var(--line); }
thead th { vertical-align: bottom; background: var(--band); }
tbody th { font-weight: 400; }
tbody th[scope=rowgroup] { font-weight: 600; background: var(--band); }
td.number { white-space: nowrap; }
.gain { color: var(--soft); display: block; font-size: 0.85em; }
.second { text-decoration: underline; text-underline-offset: 3px; }
.yes { color: var(--yes); font-weight: 600; }
.no { color: var(--no); font-weight: 600; }
.open { font-weight: 600; }
.verdict { white-space: nowrap; }
.claim { min-width: 12rem; }
.evidence { min-width: 19rem; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); gap: 1rem; }
figure { margin: 0; min-width: 0; max-width: 52rem; }
figure img { display: block; width: 100%; min-width: 34rem; background: #ffffff; }
figcaption { font-size: 0.9rem; }
summary { cursor: pointer; padding: 0.35rem 0; color: var(--link); }
dt { font-weight: 600; } dd { margin: 0 0 0.5rem; overflow-wrap: anywhere; }
"""


def page(title: str, body: str) -> str:
    """A whole page around `body`, which is HTML already; the title is text."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<a class="skip" href="#content">Skip to the content</a>\n<main id="content">\n{body}\n'
        "</main>\n</body>\n</html>\n"
    )


def scroller(label: str, content: str) -> str:
    """Wide content in a box of its own that scrolls, by keyboard too, so that the page itself never does."""
    return f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0">\n{content}\n</div>'


def paragraphs(texts: list[str]) -> str:
    return "\n".join(f"<p>{escape(text)}</p>" for text in texts)


def picture(svg: Path, alt_text: str) -> str:
    """The picture itself inside the page, not a link to it."""
    data = base64.b64encode(svg.read_bytes()).decode()
    return f'<img alt="{escape(alt_text)}" src="data:image/svg+xml;base64,{data}">'
