"""Hook of mkdocs: a link from a page to a file outside docs/ leads to the repository.

Its address is `repo_url`; without one, the words of the link stay and lead nowhere.
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
