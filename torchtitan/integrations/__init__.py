"""Adapters between the engine and other programs: one folder or module per program."""
