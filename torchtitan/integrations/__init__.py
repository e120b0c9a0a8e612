"""The engine inside other frameworks, each behind an extra of its own."""
