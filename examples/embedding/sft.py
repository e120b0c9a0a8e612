"""Fine-tune from one's own loop, on one's own batches. Also under torchrun, on any number of ranks."""

import torch

from torchtitan.config import job_config as config
from torchtitan.engine import TrainingEngine

job = config.JobConfig(
    model=config.Model(name="llama3", flavor="debugmodel", attn_type="varlen"),
    optimizer=config.Optimizer(lr=1e-3),
    lr_scheduler=config.LRScheduler(warmup_steps=2, total_steps=20),
    training=config.Training(mixed_precision_param="float32"),
)
job.model.attn_mask_type = "position_block_causal"


def pack(documents):
    """One row [1, T] of documents that don't see each other: positions begin anew in each."""
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    nothing = torch.tensor([-100])  # a document's last token predicts nothing
    labels = torch.cat([torch.cat((document[1:], nothing)) for document in documents])
    return {"input": torch.cat(documents)[None], "positions": positions[None]}, labels[None]


with TrainingEngine(job) as engine:
    torch.manual_seed(engine.dp_rank)  # ranks that share a batch draw the same one
    documents = [torch.randint(0, 2048, (n,)) for n in (50, 7, 120, 31)]
    num_valid = torch.tensor(sum(map(len, documents)) - len(documents), device=engine.device)
    if engine.dp_group is not None:
        torch.distributed.all_reduce(num_valid, group=engine.dp_group)
    batches, labels = map(list, zip(pack(documents[:2]), pack(documents[2:]), strict=True))
    for step in range(5):
        loss = engine.forward_backward_step(
            input_dict=batches, labels=labels, global_valid_tokens=num_valid
        )
        result = engine.optim_step()
        print(f"step {step + 1}: loss {loss:.3f}, norm {result.grad_norm:.2f}, lr {result.lr:.1e}")
