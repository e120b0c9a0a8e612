"""Tests that an embedder, too, can run on an installed torchtitan."""
