"""What is lowered: models with few layers and the sizes of real ones, and what each may launch."""

from dataclasses import dataclass, field

from tests.cuda_rehearsal.cases import CP, EP, FLEX, OP, TP, VARLEN

SDPA = "--model.attn_type=sdpa --model.attn_mask_type=causal"
FLOAT8 = "--model.converters=quantize.linear.float8 --quantize.linear.float8.filter_fqns=output"


@dataclass(frozen=True)
class Case:
    """seq_lens: of the steps, one after the other; each has other documents. n_layers: as many as
    show each kind of layer. flavor: of the family that the name begins with. compile: flags."""

    flavor: str
    flags: str
    n_layers: int = 2
    ranks: int = 1
    rows: int = 1
    seq_lens: tuple[int, ...] = (4096,) * 3
    compile: str = "--compile.enable"


CASES = {
    "llama3 small flex": Case("lowered", FLEX, rows=2, seq_lens=(1024,) * 4),
    "llama3 small lengths": Case("lowered", FLEX, seq_lens=(1024, 768, 512, 896, 1000)),
    # Flex attention is compiled and tuned by itself.
    "llama3 small tuned": Case("lowered", FLEX, compile=""),
    "llama3 1B flex": Case("1B", FLEX, rows=2, seq_lens=(4096,) * 8),
    "llama3 1B varlen": Case("1B", VARLEN, rows=2, seq_lens=(4096,) * 8),
    "llama3 8B flex op": Case("8B", f"{FLEX} {OP}"),
    "llama3 8B float8": Case("8B", f"{SDPA} {FLOAT8}"),
    "llama3 8B tp flex": Case("8B", f"{FLEX} {TP}2", ranks=2),
    "llama3 8B cp varlen": Case("8B", f"{VARLEN} {CP}2", ranks=2),
    "qwen3 0.6B flex": Case("0.6B", FLEX, rows=2, seq_lens=(4096,) * 8),
    "qwen3 30B-A3B flex": Case("30B-A3B", FLEX),
    "qwen3 30B-A3B ep varlen": Case("30B-A3B", f"{VARLEN} {EP}2", ranks=2),
    "deepseek_v3 16B flex": Case("16B", FLEX),
    "gpt_oss 20b flex": Case("20b", FLEX),
}
QUICK = {"llama3 small flex"}


@dataclass(frozen=True)
class Expected:
    """Of `step.Lowered`."""

    graphs: list[str]
    recompiled: int = 0
    breaks: int = 0
    problems: list[str] = field(default_factory=list)
    spills: dict[str, int] = field(default_factory=dict)


_ROPE = "1 unsqueeze, 1 view_as_real"  # of the table of complex numbers: views
_LOSS = ["forward: 3 triton", "forward: 1 triton"]  # two of them are per token
_DENSE = [f"forward: 7 mm, 7 triton, {_ROPE}", *_LOSS, "backward: 14 mm, 10 triton"]
_VARLEN = "1 _varlen_attn"
_ROUTER = "1 mm_dtype in float32, 2 scatter_, 1 scatter_reduce_, 1 sort, 1 topk"
_GPT_OSS = f"forward: 2 _grouped_mm, 4 addmm, {_ROUTER}, 25 triton"
_FLEX_BACKWARD = "triton_tem_fused_flex_attention_backward_transpose_view_"
EXPECTED: dict[str, Expected] = {
    "llama3 1B flex": Expected(_DENSE),
    # Once more for any number of documents.
    "llama3 1B varlen": Expected([
        f"forward: {_VARLEN}, 7 mm, 6 triton, {_ROPE}", *_LOSS,
        f"backward: {_VARLEN}_backward, 14 mm, 8 triton",
    ], recompiled=2),
    "qwen3 0.6B flex": Expected(
        ["forward: 7 mm, 8 triton", *_LOSS, "backward: 14 mm, 14 triton"],
        spills={f"{_FLEX_BACKWARD}3": 256},
    ),
    "qwen3 30B-A3B flex": Expected([
        f"forward: 3 _grouped_mm, 4 mm, {_ROUTER}, 20 triton", *_LOSS,
        "backward: 6 _grouped_mm, 8 mm, 1 mm_dtype, 1 mm_dtype in float32, 23 triton",
    ], spills={f"{_FLEX_BACKWARD}12": 248}),
    # Once more for all lengths, whose kernels compute more addresses, and for a length that blocks of
    # 128 do not divide.
    "llama3 small lengths": Expected(_DENSE, recompiled=6, spills={f"{_FLEX_BACKWARD}3": 48}),
    # A sum over the tokens of gradients of a norm's weight.
    "llama3 small flex": Expected(
        _DENSE, spills={"triton_red_fused__to_copy__unsafe_view_add_mul_sum_view_6": 8}
    ),
    # Recomputed: three products.
    "llama3 8B flex op": Expected([
        f"forward: 7 mm, 7 triton, {_ROPE}", *_LOSS, f"backward: 17 mm, 13 triton, {_ROPE}",
    ], spills={
        "triton_tem_fused__to_copy__unsafe_view_add_flex_attention_backward_mul_stack_sub_"
        "transpose_unbind_view_6": 248
    }),
    "llama3 8B tp flex": Expected([
        "forward: 2 all_gather_into_tensor, 7 mm, 2 reduce_scatter_tensor, 7 triton, "
        f"{_ROPE}, 4 wait_tensor", *_LOSS,
        "backward: 2 all_gather_into_tensor, 2 all_reduce_, 14 mm, 2 reduce_scatter_tensor, "
        "13 triton, 6 wait_tensor",
    ], spills={f"{_FLEX_BACKWARD}6": 248}),
    "llama3 8B cp varlen": Expected([
        f"forward: {_VARLEN}, 1 all_gather_into_tensor, 7 mm, 7 triton, {_ROPE}, 1 wait_tensor", *_LOSS,
        f"backward: {_VARLEN}_backward, 1 index_add, 14 mm, 1 reduce_scatter_tensor, "
        "11 triton, 1 wait_tensor",
    ], recompiled=2),
    "llama3 8B float8": Expected([
        f"forward: 1 _scaled_dot_product_cudnn_attention, 7 _scaled_mm, 36 triton, {_ROPE}", *_LOSS,
        "backward: 1 _scaled_dot_product_cudnn_attention_backward, 14 _scaled_mm, 41 triton",
    ]),
    # A block is compiled around the wait for the numbers of tokens.
    "qwen3 30B-A3B ep varlen": Expected([
        f"forward: {_VARLEN}, 4 mm, 3 triton",
        "forward: 1 mm_dtype in float32, 1 scatter_reduce_, 1 topk, 4 triton",
        "forward: 3 _grouped_mm, 2 triton", *_LOSS,
        "backward: 6 _grouped_mm, 2 triton",
        "backward: 1 mm_dtype, 1 mm_dtype in float32, 7 triton",
        f"backward: {_VARLEN}_backward, 8 mm, 7 triton",
    ], recompiled=2),
    "deepseek_v3 16B flex": Expected([
        f"forward: 7 mm, 7 triton, {_ROPE}",
        f"forward: 3 _grouped_mm, 7 mm, {_ROUTER}, 20 triton, {_ROPE}", *_LOSS,
        "backward: 6 _grouped_mm, 14 mm, 1 mm_dtype, 1 mm_dtype in float32, 23 triton",
        "backward: 14 mm, 15 triton",
    ], spills={f"{_FLEX_BACKWARD}{n}": 56 for n in (11, 3)}),
    # Layers with a window, and layers without.
    "gpt_oss 20b flex": Expected([
        _GPT_OSS, _GPT_OSS, *_LOSS,
        *["backward: 4 _grouped_mm, 8 mm, 2 mm_dtype in float32, 37 triton"] * 2,
    ]),
    # Attention alone is compiled.
    "llama3 small tuned": Expected(["forward: 1 triton", "backward: 2 triton"]),
}  # fmt: skip
