"""The row lengths that context parallelism accepts."""

# The "ptrr" balancer distributes chunks of this many tokens, the block size of flex attention's masks.
PTRR_CHUNK = 128


def sequence_multiple(load_balancer: str | None, cp: int) -> int:
    """Return the number that must divide T, for rows of T tokens on `cp` context-parallel ranks."""
    multiples = {None: cp, "headtail": 2 * cp, "ptrr": cp * PTRR_CHUNK}
    if (load_balancer or None) not in multiples:
        raise ValueError(
            "parallelism.context_parallel_load_balancer must be headtail, ptrr or None, got "
            f"{load_balancer!r}"
        )
    return multiples[load_balancer or None]
