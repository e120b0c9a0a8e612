"""The stages of a pipeline: their number, their ranks, and the names of the modules in each."""

import math
import re
from itertools import islice

from torchtitan.config.job_config import Parallelism
from torchtitan.tools.files import open_file

# Schedules of torch.distributed.pipelining in which pipeline rank r owns stage r.
SINGLE_STAGE_SCHEDULES = ("1F1B", "GPipe")
# Pipeline rank r owns the stages r, r + pp, r + 2 pp, ...
LOOPED_SCHEDULES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
# Pipeline rank r owns stage r and its mirror image, stage 2 pp - 1 - r.
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
# Schedules that read their actions from parallelism.pipeline_parallel_schedule_csv.
CSV_SCHEDULES = ("PipelineScheduleMulti",)
SCHEDULES = SINGLE_STAGE_SCHEDULES + LOOPED_SCHEDULES + V_SCHEDULES + CSV_SCHEDULES


def is_one_of(name: str, schedules: tuple[str, ...]) -> bool:
    """True if `name` is one of `schedules`, ignoring case as torch does."""
    return name.lower() in {schedule.lower() for schedule in schedules}


def splits_backward(parallelism: Parallelism) -> bool:
    """True if the schedule computes gradients of inputs and of weights in separate actions."""
    if path := parallelism.pipeline_parallel_schedule_csv:
        with open_file(path, encoding="utf-8") as file:
            return re.search(r"\d[IW]", file.read()) is not None
    zero_bubble = ("InterleavedZeroBubble", *V_SCHEDULES)
    return is_one_of(parallelism.pipeline_parallel_schedule, zero_bubble)


def rank_of_last_stage(schedule: str, pp_degree: int) -> int:
    """Return the pipeline rank that owns the last stage."""
    return 0 if is_one_of(schedule, V_SCHEDULES) else pp_degree - 1


def stage_ids_of_rank(schedule: str, pp_rank: int, pp_degree: int, num_stages: int) -> list[int]:
    """Return the stages that a pipeline rank owns, in order. ValueError if num_stages does not fit."""
    if num_stages % pp_degree:
        raise ValueError(
            f"every rank of a pipeline must hold the same number of stages, got {num_stages} stages for "
            f"parallelism.pipeline_parallel_degree = {pp_degree}; make the stages a multiple of it"
        )
    if not is_one_of(schedule, V_SCHEDULES):
        return list(range(pp_rank, num_stages, pp_degree))
    if num_stages != 2 * pp_degree:
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule = {schedule!r} needs exactly 2 stages per "
            f"rank, got {num_stages} stages on {pp_degree} ranks; split into {2 * pp_degree}"
        )
    return [pp_rank, num_stages - 1 - pp_rank]


def modules_of_stages(parallelism: Parallelism, n_layers: int) -> list[list[str]]:
    """Return the module names of each stage of a decoder. ValueError if layers and stages do not fit."""
    pp, schedule = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    modules = parallelism.module_fqns_per_model_part
    per_stage = parallelism.pipeline_parallel_layers_per_stage
    weights = (
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    )
    if modules is not None:
        _check_complete(modules, n_layers)
        num_stages, what = len(modules), "the lists in module_fqns_per_model_part"
    elif per_stage is not None:
        effective = n_layers + sum(weights)
        num_stages = math.ceil(effective / per_stage)
        what = (
            f"{n_layers} layers (counted as {effective} with embedding and output) by "
            f"pipeline_parallel_layers_per_stage = {per_stage}"
        )
    else:
        num_stages, what = pp if is_one_of(schedule, SINGLE_STAGE_SCHEDULES) else 2 * pp, ""

    got = f"{what} give {num_stages} stages for {pp} ranks"
    if num_stages % pp:
        raise ValueError(
            f"the number of pipeline stages must be a multiple of "
            f"parallelism.pipeline_parallel_degree, but {got}; change one of them"
        )
    per_rank = num_stages // pp
    if is_one_of(schedule, SINGLE_STAGE_SCHEDULES):
        fits, needed = per_rank == 1, "exactly 1 stage"
    elif is_one_of(schedule, V_SCHEDULES):
        fits, needed = per_rank == 2, "exactly 2 stages"
    else:
        fits, needed = per_rank >= 2, "at least 2 stages"
    if not fits:
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule = {schedule!r} needs {needed} per rank, but "
            f"{got}; change the number of stages or the schedule"
        )
    if modules is not None:
        return modules
    try:
        return generate_llm_fqn_per_model_part(num_stages, n_layers, *weights)
    except ValueError as error:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree = {pp} with "
            f"schedule {schedule!r} makes {num_stages} stages, which "
            f"{n_layers} layers don't fill: {error}; lower the degree, choose a schedule with one "
            "stage per rank, or lower pipeline_parallel_{first,last}_stage_less_layers"
        ) from None


def _check_complete(modules: list[list[str]], n_layers: int) -> None:
    """Raise ValueError unless every module is listed once; the model would lose an unlisted module."""
    listed = [name for stage in modules for name in stage]
    expected = ["tok_embeddings", *(f"layers.{i}" for i in range(n_layers)), "norm", "output"]
    missing = [name for name in expected if name not in listed]
    twice = sorted({name for name in listed if listed.count(name) > 1})
    in_order = [name for name in listed if name in expected] == expected
    if missing or twice or not in_order:
        wrong = (
            f"lacks {missing}" if missing else f"repeats {twice}" if twice else "is out of order"
        )
        raise ValueError(
            "parallelism.module_fqns_per_model_part must list tok_embeddings, layers.0 to "
            f"layers.{n_layers - 1}, norm and output once each and in this order, got a list that "
            f"{wrong}; correct it"
        )


def generate_llm_fqn_per_model_part(
    num_stages: int, num_layers: int, input_weight: int = 1, output_weight: int = 1
) -> list[list[str]]:
    """Return the names of the modules in each stage, with layers spread as evenly as possible.

    input_weight, output_weight: the cost of the embedding, and of norm and output, as a number of layers.
    If the layers do not divide evenly, the first stages get one more layer each. Raises ValueError if there are too
    many stages, or if the embedding or the output costs more than a stage's share.
    """
    if num_stages < 1:
        raise ValueError(f"a pipeline has at least 1 stage, got {num_stages}")
    layers = [f"layers.{i}" for i in range(num_layers)]
    if num_stages == 1:
        return [["tok_embeddings", *layers, "norm", "output"]]
    effective = num_layers + input_weight + output_weight
    if num_stages > effective:
        raise ValueError(
            f"{num_stages} stages are more than {num_layers} layers plus the weights "
            f"{input_weight} and {output_weight} of embedding and output"
        )
    quota, left_over = divmod(effective, num_stages)
    for name, weight in (("embedding", input_weight), ("output", output_weight)):
        if weight > quota:
            raise ValueError(
                f"the {name} weighs {weight} layers, more than a stage's share, {quota}"
            )
    counts = [quota + (stage < left_over) for stage in range(num_stages)]
    counts[0] -= input_weight
    counts[-1] -= output_weight

    remaining = iter(layers)
    stages = [list(islice(remaining, count)) for count in counts]
    return [["tok_embeddings", *stages[0]], *stages[1:-1], [*stages[-1], "norm", "output"]]
