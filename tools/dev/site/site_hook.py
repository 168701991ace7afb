"""Events of mkdocs, which loads this file by its path: `hooks` in mkdocs.yml.

The work is in `site_pages`; a description or a page that is missing ends the build with its name.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

pages: Any = import_module("kvcascade.tools.dev.site.site_pages")
DECISIONS, RUNS = "Decisions", "Benchmarks"
"""Sections of the navigation that the hook fills."""


def on_config(config: Any) -> Any:
    """Fill the sections of decisions and of benchmark runs."""
    for item in config.nav:
        for section in next(iter(item.values())):
            if isinstance(section, dict) and DECISIONS in section:
                section[DECISIONS] += pages.decision_nav()
            elif isinstance(section, dict) and RUNS in section:
                section[RUNS] += pages.benchmark_nav()
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are no files of the folder, and check that no generated part is left
    out."""
    for name, text in pages.virtual_pages().items():
        files.append(File.generated(config, name, content=text))
    texts = {page.src_uri: page.content_string for page in files.documentation_pages()}
    missing = pages.unplaced(texts)
    if missing:
        raise PluginError(f"no page has the generated part of {', '.join(sorted(missing))}")
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Any) -> str:
    """Fill in generated parts, and turn links of the repository into links of the site."""

    def known(name: str) -> bool:
        return files.get_file_from_path(name) is not None

    try:
        return str(pages.relinked(page.file.src_uri, pages.filled(text), known))
    except (pages.UndescribedError, pages.DeadLinkError, KeyError) as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error
