"""MkDocs hook: what the pages link to beside docs/ (pictures, measured tables, top-level pages) belongs to the site.

Nothing of the site is fetched: the script by which its search works without a server is npm's iframe-worker 1.0.4.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parent.parent
BESIDE = [
    "reports/pictures/*.png",
    "reports/pictures/concepts/*.png",
    "reports/gallery/*",
    "benchmarks/results/README.md",
    "*.md",
]
LEFT_OUT = {"README.md"}  # index.md says the same to who is here already


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The site's files with those of other folders, under their paths."""
    for path in sorted(path for pattern in BESIDE for path in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        if name not in LEFT_OUT:
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Top-level pages and those of docs/ lie side by side in the site."""
    if not str(page.file.abs_src_path).startswith(str(ROOT / "docs")):
        return markdown.replace("](docs/", "](")
    up = "../" * page.file.src_uri.count("/")
    return markdown.replace(f"]({up}../", f"]({up}")


def on_post_page(output: str, page: Page, **_: object) -> str:
    """A page that loads nothing from elsewhere."""
    shim = get_relative_url("vendor/iframe-worker/shim.js", page.url)
    return output.replace("https://unpkg.com/iframe-worker/shim", shim)
