"""Rules about the config together with its model's train spec and args."""

from collections.abc import Collection, Iterator
from typing import Any

from torchtitan.config.checks.common import (
    attn_type_of,
    divides,
    has_experts,
    has_value_head,
    one_of,
    problem_in,
)
from torchtitan.config.checks.values import hf_conversion
from torchtitan.config.job_config import JobConfig
from torchtitan.config.mask_types import check_kernel, separates_documents


def model_sizes(model_args: Any) -> Iterator[str]:
    for name in ("dim", "n_layers", "n_heads", "vocab_size"):
        value = getattr(model_args, name, 1)
        if not 1 <= value < 2**24:
            yield f"model.args.{name} must be at least 1 and below 2**24, got {value}; correct it"
    n_heads, n_kv_heads = (getattr(model_args, name, 0) for name in ("n_heads", "n_kv_heads"))
    if n_kv_heads:
        yield from divides("model.args.n_kv_heads", n_kv_heads, "n_heads", n_heads)
    if getattr(model_args, "head_dim", 0) is None:
        dim = getattr(model_args, "dim", 0)
        yield from divides("model.args.n_heads", n_heads, "dim (or give head_dim)", dim)


def flavor(job_config: JobConfig, train_spec: Any) -> Iterator[str]:
    key, known = f"model.flavor of {job_config.model.name!r}", list(train_spec.model_args)
    yield from one_of(key, job_config.model.flavor, known)


def attention(job_config: JobConfig, model_args: Any) -> Iterator[str]:
    mask_type = job_config.model.attn_mask_type or getattr(model_args, "attn_mask_type", "causal")
    yield from problem_in(check_kernel, attn_type_of(job_config, model_args), mask_type)
    if job_config.loss.name == "dpo" and not separates_documents(str(mask_type)):
        yield (
            f"model.attn_mask_type must keep the two answers of a pair apart, got {mask_type!r}; set it to "
            "'block_causal', with model.attn_type 'flex' or 'varlen'"
        )


def heads(
    job_config: JobConfig, train_spec: Any, model_args: Any, builds_data: bool
) -> Iterator[str]:
    name = job_config.model.name
    for key in ("value_head", "fp32_head"):
        if getattr(job_config.model, key) and not hasattr(model_args, key):
            yield (
                f"model.{key} = True needs a model on torchtitan.models.decoder.Decoder, got "
                f"{name!r}, whose args have no {key}; set it to false"
            )
    # A program that passes its own batches to a trainer also has its own loss.
    reads_data = builds_data and train_spec.build_dataloader_fn is not None
    if has_value_head(job_config, model_args) and reads_data and train_spec.fact("has_token_loss"):
        yield (
            f"model.value_head = True with {name!r} gives values, and its train spec's loss needs "
            "logits; train with an engine and a loss_fn (docs/embedding.md, Values)"
        )


def gradient_reduction(job_config: JobConfig, train_spec: Any, builds_data: bool) -> Iterator[str]:
    reduction = job_config.training.gradient_reduction
    if reduction != "sum" and builds_data and train_spec.build_dataloader_fn is not None:
        yield (
            f"training.gradient_reduction = {reduction!r} is for programs that feed an engine: a trainer "
            "with data divides the loss by a count over all ranks; set it to 'sum'"
        )


def output_in_high_precision(job_config: JobConfig) -> Iterator[str]:
    tp = job_config.parallelism.tensor_parallel_degree
    for kind in ("float8", "mx"):
        name = f"quantize.linear.{kind}"
        filters = getattr(job_config.quantize.linear, kind).filter_fqns
        if name not in job_config.model.converters or any(part in "output" for part in filters):
            continue
        reason = "parallelism.tensor_parallel_degree above 1" if kind == "float8" and tp > 1 else ""
        if reason := "model.fp32_head = True" if job_config.model.fp32_head else reason:
            yield (
                f"{reason} leaves the output projection in high precision, got {name} in "
                f"model.converters with filter_fqns = {filters}; add 'output' to {name}.filter_fqns"
            )


def converters(job_config: JobConfig, known: Collection[str]) -> Iterator[str]:
    # Suggest converters for dense models first, because most models are dense.
    known = sorted(known, key=lambda name: ".grouped_mm." in name)
    for name in job_config.model.converters:
        for problem in one_of("each name in model.converters", name, known):
            yield f"{problem}; experimental.custom_import can name a module that registers more"


def converters_of_experts(job_config: JobConfig, model_args: Any) -> Iterator[str]:
    for name in job_config.model.converters:
        if name.startswith("quantize.grouped_mm.") and not has_experts(model_args):
            yield (
                f"{name} in model.converters converts experts, and flavor {job_config.model.flavor!r} "
                f"has none; {name.replace('grouped_mm', 'linear')} converts linear layers"
            )


def builders(job_config: JobConfig, train_spec: Any) -> Iterator[str]:
    if train_spec.state_dict_adapter is None:
        yield from hf_conversion(job_config.checkpoint, repr(job_config.model.name))
    name, known = job_config.optimizer.name, train_spec.fact("optimizer_names")
    if known is not None:
        yield from one_of("optimizer.name", name, known)


def tokenizer(tokenizer: Any, model_args: Any) -> Iterator[str]:
    tokens, rows = tokenizer.get_vocab_size(), getattr(model_args, "vocab_size", None)
    if hasattr(tokenizer, "get_vocab"):  # ids may have gaps
        tokens = max(tokens, 1 + max(tokenizer.get_vocab().values(), default=-1))
    if rows is not None and tokens > rows:
        yield (
            f"the tokenizer at model.hf_assets_path must not have more tokens than the model, got "
            f"{tokens} tokens and vocab_size {rows}; set it to the tokenizer of model.flavor"
        )
