"""The OpenAI-style HTTP API over an AsyncEngine, its metrics and the command line. Knows nothing of tensors or blocks."""

__version__ = "0.1.0"
