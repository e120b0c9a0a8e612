"""Tiny models of every family, and a record of the operators that run."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64, "max_seq_len": 64}


def sized(args_cls, **fields):
    """Args of these sizes, with other fields."""
    return args_cls(**_SIZES | fields)


def on_meta(model_cls, args):
    with torch.device("meta"):
        return model_cls(args)


def filled(model, seed=0):
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights()
    return model


class Operators(TorchDispatchMode):
    """Records operators and the shapes of their results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, tuple(out.shape) if isinstance(out, torch.Tensor) else None))
        return out
