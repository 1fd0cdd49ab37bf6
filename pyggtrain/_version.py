"""The version, where every layer may read it; pyproject.toml says the same, which a test compares."""

__version__ = "0.1.0"
