"""Failures that end a run without being bugs of this program."""


class ConfigError(ValueError):
    """The config cannot work as it stands; the message says what to change."""


class RunError(RuntimeError):
    """Something outside this program failed: a full disk, a lost rank, a damaged file.

    The message says what, where and what to do, so `torchtitan.train.main` prints it without a
    stack and exits with 1.
    """


class LostConnectionError(RunError):
    """A collective failed since another rank is gone, or does not answer."""
