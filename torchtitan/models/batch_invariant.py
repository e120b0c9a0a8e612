"""Makes a model's forward compute the same bits for a token in every batch; see `numerics.batch_invariant`."""

from collections.abc import Sequence

from torch import nn
from torch.nn import functional as F

from torchtitan.models.decoder import Attention, Decoder, FeedForward, OutputProjection
from torchtitan.models.rope import BATCH_INVARIANT_ROPE
from torchtitan.numerics.batch_invariant import batch_invariant_linear, batch_invariant_silu
from torchtitan.numerics.linear import Linear
from torchtitan.tools.errors import ConfigError


def use_batch_invariant(parts: Sequence[nn.Module]) -> None:
    """Replace a model's matrix products, attention and activations by those of `numerics.batch_invariant`.

    Gradients stay those of the ordinary operations. Raises ConfigError for a module without a
    batch-invariant form, such as a mixture of experts.
    """
    for part in parts:
        if not isinstance(part, Decoder):
            raise ConfigError(
                "rl.generator.exact needs a subclass of torchtitan.models.decoder.Decoder, got "
                f"{type(part).__name__}; turn it off"
            )
        for block in part.layers.values():
            feed_forward = block.moe if block.moe_enabled else block.feed_forward
            for module, kind in ((block.attention, Attention), (feed_forward, FeedForward)):
                if type(module).forward is not kind.forward or not _has_form(module):
                    raise ConfigError(
                        f"rl.generator.exact supports only the {kind.__name__} of Llama, got a different "
                        f"{type(module).__name__} in {type(part).__name__}; turn it off, or choose a "
                        "dense llama3 or qwen3"
                    )
        for module in part.modules():
            if isinstance(module, Linear):
                if type(module).forward not in (Linear.forward, OutputProjection.forward):
                    raise ConfigError(
                        f"rl.generator.exact needs plain linear layers, got {type(module).__name__}; "
                        "turn it off, or take out model.converters and tensor parallelism"
                    )
                module.product = batch_invariant_linear
            elif isinstance(module, FeedForward):
                module.activation = batch_invariant_silu
            elif isinstance(module, Attention):
                module.apply_rope = BATCH_INVARIANT_ROPE.get(module.apply_rope, module.apply_rope)
                module.inner_attention.batch_invariant = True


def _has_form(module: nn.Module) -> bool:
    if isinstance(module, FeedForward):
        return module.activation in (F.silu, batch_invariant_silu)
    is_known = module.apply_rope in {*BATCH_INVARIANT_ROPE, *BATCH_INVARIANT_ROPE.values()}
    return is_known and module.wg is None
