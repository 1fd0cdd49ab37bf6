"""Every setting stands in the docs, in the words of its docstring."""

from pathlib import Path

from pyggtrain.training.config import field_docs, field_types
from pyggtrain.training.reference import SECTIONS, sections, settings_reference

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def test_sections_cover_all_settings_in_order():
    names = [field.name for fields in sections().values() for field in fields]
    assert names == list(field_types())
    assert list(sections()) == list(SECTIONS)


def test_reference_names_every_setting_with_its_docstring():
    text = settings_reference()
    for name, meaning in field_docs().items():
        assert f"| `{name}` | " in text and meaning.replace("|", "\\|") in text


def test_the_docs_hold_the_reference():
    assert settings_reference() in PAGE.read_text(encoding="utf-8"), (
        "docs/training.md is out of date: replace its tables with the output of "
        "`python -c 'from pyggtrain.training.reference import settings_reference as r; print(r())'`"
    )
