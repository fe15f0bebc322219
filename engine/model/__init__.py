"""From a name to computed logits: model files, weights, and the layers over them.

Knows nothing of requests, scheduling or HTTP; which block holds what is told to it step by step.
"""
