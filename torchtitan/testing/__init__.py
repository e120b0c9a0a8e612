"""Tests that authors of embedding programs can run on an installed torchtitan."""
