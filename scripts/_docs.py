"""Write the generated pages: each `_docs_NAME.py` beside this file has `render() -> {path: text}`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def rendered() -> dict[str, str]:
    """All pages, by their path from the root of the repository."""
    pages: dict[str, str] = {}
    for script in sorted(Path(__file__).parent.glob("_docs_*.py")):
        spec = importlib.util.spec_from_file_location(script.stem, script)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for path, text in module.render().items():
            assert path not in pages, f"{script.name} and another script both make {path}"
            pages[str(path)] = text
    return pages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when a page is out of date")
    check = parser.parse_args().check
    stale = 0
    for path, text in rendered().items():
        page = ROOT / path
        if page.exists() and page.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if not check:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(text, encoding="utf-8")
        print(f"{path} {'is out of date: run scripts/docs' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
