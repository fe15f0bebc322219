"""Attention over the paged KV cache: a list of work items, planned once per step, run once per layer.

Knows blocks' bytes and query rows. Does not know requests, sampling or RoPE scaling: keys arrive rotated.
"""
