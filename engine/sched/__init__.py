"""Which tokens of which requests are computed in the next step.

Knows requests and block tables. Does not know tensors, the model, text or clocks other than the one it is given.
"""
