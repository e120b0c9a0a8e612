"""What ends a run without being a bug of this program."""


class RunError(RuntimeError):
    """Something outside this program failed: a full disk, a lost rank, a damaged file.

    The message says what, where and what to do, so `torchtitan.train.main` prints it without a
    stack and exits with 1.
    """
