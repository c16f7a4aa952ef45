"""Hooks of mkdocs: links of pages and notebooks, as in the repository, lead right on the site.

A file outside docs/ is at `repo_url`; without one, the words of the link stay and lead nowhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(((?:\.\./)+[^)#\s]*)[^)\s]*\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    docs = Path(config.docs_dir).resolve()
    folder = Path(page.file.abs_src_path).parent

    def leads(link: re.Match[str]) -> str:
        there = (folder / link[2]).resolve()
        if there.is_relative_to(docs) or not there.exists():
            return link[0]
        path = there.relative_to(docs.parent).as_posix()
        return f"[{link[1]}]({config.repo_url}/blob/main/{path})" if config.repo_url else link[1]

    return LINK.sub(leads, markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Notebooks lie beside docs/ in the repository, and within it on the site."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    html = re.sub(r'href="\.\./docs/([^"#]+)\.md', r'href="../\1.html', html)
    return re.sub(r'href="([\w-]+)\.ipynb', r'href="\1.html', html)
