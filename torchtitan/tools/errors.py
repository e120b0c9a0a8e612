"""Failures that end a run without being bugs of this program."""


class ConfigError(ValueError):
    """The config cannot work as it stands; the message says what to change.

    sentence: the line to print for a user, if the message also holds a text of the reference that
        programs look for.
    """

    def __init__(self, message: str, sentence: str | None = None) -> None:
        super().__init__(message)
        self.sentence = sentence or message


class RunError(RuntimeError):
    """Something outside this program failed: a full disk, a lost rank, a damaged file.

    The message says what, where and what to do, so `torchtitan.train.main` prints it without a
    stack and exits with 1.
    """


class LostConnectionError(RunError):
    """A collective failed because another rank is gone or does not answer."""
