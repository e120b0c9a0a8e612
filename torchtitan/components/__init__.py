"""The import path in torchtitan 0.2.xs. The package itself doesn't import from here."""
