"""The reference's paths. Nothing of the package imports from here."""
