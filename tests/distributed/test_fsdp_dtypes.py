"""The tensors that FSDP casts to bf16, and those that it leaves in fp32."""

import pytest
import torch

from tests.distributed import parallel_dims
from tests.reliability.jobs import flags_in
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.engine import TrainingEngine
from torchtitan.models.parallelize import parallelize_decoder
from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs
from torchtitan.testing.gloo import run_ranks

VOCAB, LENGTH, ROWS = 64, 16, 4


def build(dp_shard):
    config = JobConfig()
    config.activation_checkpoint.mode = "none"
    config.training.mixed_precision_param = "bfloat16"
    sizes = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=48)
    with torch.device("meta"):
        model = Qwen3Model(Qwen3ModelArgs(vocab_size=VOCAB, max_seq_len=4096, **sizes))
    dims = parallel_dims(dp_shard=dp_shard)
    model = parallelize_decoder(model, dims, config).to_empty(device="cpu")
    with torch.no_grad(), seeded_init(model, 1):
        model.init_weights()
    return model


def bf16_logits(dp_shard):
    """Return (logits of rows that begin at position 4000, dtypes of the inputs of a block's attention)."""
    model = build(dp_shard)
    if dp_shard == 1:  # what FSDP does to parameters, and only to them
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    dtypes = []
    model.layers["1"].attention.register_forward_pre_hook(
        lambda module, args: dtypes.extend(arg.dtype for arg in args[:2])
    )
    rank = torch.distributed.get_rank() if dp_shard > 1 else 0
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator).chunk(dp_shard)[rank]
    positions = torch.arange(4000, 4000 + LENGTH).expand(len(tokens), -1)
    with torch.no_grad():
        return model(tokens, positions=positions), dtypes


def test_position_tables_stay_fp32_where_parameters_are_bf16():
    expected, _ = bf16_logits(1)
    results = run_ranks(bf16_logits, 2, 2)
    for _, dtypes in results:
        assert dtypes == [torch.bfloat16, torch.float32]
    assert torch.equal(torch.cat([logits for logits, _ in results]), expected)


def decay_in_bf16_training(folder, flags):
    """Return what two steps saw of a layer's A_log, and its value after them.

    For each step: its value and dtype in the forward, the dtype of another weight, and its gradient.
    """
    options = flags_in(f"""
        model.name=qwen3_5 model.flavor=debugmodel training.seq_len=32 training.local_batch_size=2
        training.mixed_precision_param=bfloat16 activation_checkpoint.mode=none {flags}
    """)
    config = ConfigManager().parse_args([*options, f"--job.dump_folder={folder}"])
    with TrainingEngine(config) as engine:
        (model,) = engine.model_parts
        layer = model.layers["0"].attention
        seen, parameter = [], layer.decay.A_log

        def record(*_):
            seen.append([layer.decay.A_log.detach().clone(), layer.wq.weight.dtype])

        layer.inner_attention.register_forward_pre_hook(record)
        tokens = torch.arange(64).view(2, 32)
        for _ in range(2):
            engine.forward_backward_step(
                input_dict={"input": tokens}, labels=tokens, global_valid_tokens=128
            )
            seen[-1].append(parameter.grad.full_tensor())
            engine.optim_step()
        return seen, parameter.full_tensor().detach()


@pytest.mark.parametrize("flags", ["", "compile.enable compile.backend=aot_eager"])
def test_decay_of_linear_attention_stays_fp32_where_other_parameters_are_bf16(flags, tmp_path):
    (seen, last), other = run_ranks(decay_in_bf16_training, 2, str(tmp_path), flags)
    assert torch.equal(last, other[1])
    if "compile.enable" not in flags:  # compiled code calls no hook
        (first, dtype, _), (second, *_) = seen
        assert dtype == torch.bfloat16 and first.dtype == torch.float32
        assert not torch.equal(first, first.bfloat16().float())
        assert not torch.equal(first, second)  # the second forward has the new values
    for *_, grad in seen:
        assert grad.dtype == torch.float32 and grad.any()
    assert not torch.equal(last, last.bfloat16().float())
