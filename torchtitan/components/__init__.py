"""The reference's import paths. The package itself doesn't import from here."""
