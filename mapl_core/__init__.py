"""MAPL: multi-agent preference learning for teams of language-model agents."""

__version__ = "0.1.0"
