"""docs/troubles.md names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "troubles.md"


def test_every_test_that_the_page_names_exists() -> None:
    missing, file = [], ""
    names = re.findall(r"`([\w/]+/test_\w+\.py)?(?:::(test_\w+))?`", PAGE.read_text(encoding="utf-8"))
    assert sum(bool(name) for _, name in names) > 20
    for given, name in names:
        # A name without a file is in the file named before it.
        file = given or file
        path = TESTS / file
        if not path.is_file() or (name and f"def {name}(" not in path.read_text(encoding="utf-8")):
            missing.append(f"{file}::{name}")
    assert missing == []
