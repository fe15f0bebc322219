"""Who holds which block of the KV cache, and where its bytes lie.

Knows blocks, tokens and namespaces. Does not know requests' sampling, the scheduler, the model or (but for
``storage``) torch.
"""
