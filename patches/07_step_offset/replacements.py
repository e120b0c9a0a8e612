"""A function for `torchtitan.components.lr_scheduler`."""


def with_step_offset(
    factor: Callable[[int], float], step_offset: int, warmup_steps: int
) -> Callable[[int], float]:
    """Return the schedule whose warm-up begins at (1 + step_offset) / warmup_steps of the peak.

    0 is 0.2.2's. With -1 the first step has learning rate 0, as in `transformers` and verl. The decay is
    not moved.
    """
    if step_offset not in (0, -1):
        raise ValueError(
            f"lr_scheduler.step_offset must be 0 or -1, got {step_offset}: with 0 the first step has "
            "1 / warmup_steps of the peak learning rate, with -1 it has none"
        )

    def moved(step: int) -> float:
        if step_offset == -1 and step < warmup_steps:
            return step / warmup_steps
        return factor(step)

    return moved
