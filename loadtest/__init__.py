"""Load and speed tests of any OpenAI-compatible completion server, ours or another.

Knows HTTP, ``/proc`` and nothing else: it imports neither the engine nor the server, and needs no GPU library.
"""
