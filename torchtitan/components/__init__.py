"""Import paths of torchtitan 0.2.x, for clients. This package itself does not import from here."""
