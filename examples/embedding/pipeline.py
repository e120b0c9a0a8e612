"""Pipelines: torchrun --nproc-per-node 2 examples/embedding/pipeline.py

Microbatches are a list of the caller's, of any lengths; every rank of a pipeline gives the same.
"""

import torch

from torchtitan.config import job_config as config
from torchtitan.engine import TrainingEngine

job = config.JobConfig(
    model=config.Model(name="llama3", flavor="debugmodel", attn_type="varlen"),
    lr_scheduler=config.LRScheduler(warmup_steps=0),
    training=config.Training(mixed_precision_param="float32"),
    parallelism=config.Parallelism(
        pipeline_parallel_degree=2, pipeline_parallel_schedule="Interleaved1F1B"
    ),
)
job.model.attn_mask_type = "position_block_causal"

with TrainingEngine(job) as engine:
    generator = torch.Generator().manual_seed(engine.dp_rank)
    texts = [torch.randint(0, 2048, (n,), generator=generator) for n in (41, 9, 77, 30, 18)]
    microbatches = [
        {"input": text[None, :-1], "positions": torch.arange(len(text) - 1)[None]} for text in texts
    ]
    labels = [text[None, 1:] for text in texts]
    num_valid = sum(map(torch.numel, labels)) * engine.dp_size
    for step in range(3):
        loss = engine.forward_backward_step(
            input_dict=microbatches, labels=labels, global_valid_tokens=num_valid
        )
        norm = engine.optim_step(lr=1e-3).grad_norm  # the norm of all stages, on every rank
        print(f"rank {torch.distributed.get_rank()}, step {step}: loss {loss:.3f}, norm {norm:.2f}")
    best = engine.forward_step(microbatches, output_fn=lambda logits, batch: logits.argmax(-1))
    if best is not None:  # the rank with the last stage
        hits = [(one == label).float().mean() for one, label in zip(best, labels, strict=True)]
        print("share of tokens known by heart:", torch.stack(hits).mean().item())
