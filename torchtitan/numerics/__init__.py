"""Computations of layers: matrix products, norms, the gated delta rule, low-rank and 4-bit weights."""
