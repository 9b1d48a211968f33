"""How a matrix is stored: a format is handed the checkpoint's tensors, keeps what it needs and multiplies by it.

`layers.linear` says how a matrix is divided among ranks, a format how the part of one rank is stored.
"""
