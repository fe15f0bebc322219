"""Measurements of the engine's own parts: what a KV format costs in quality, what scheduling wastes. Knows nothing of HTTP."""
