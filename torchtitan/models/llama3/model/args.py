"""The args of a Llama 3 model."""

from dataclasses import dataclass, field

from torchtitan.models.args import DecoderArgs
from torchtitan.models.rope import RoPEScalingArgs


@dataclass
class TransformerModelArgs(DecoderArgs):
    """Llama 3. The last five fields are for other checkpoints of Llama's shape.

    n_kv_heads: None means n_heads.
    multiple_of, ffn_dim_multiplier: the feed-forward's hidden size is 8/3 dim, times the
        multiplier if there is one, rounded up to this multiple.
    hidden_dim: the feed-forward's hidden size, in place of that rule.
    head_dim: None means dim / n_heads.
    attention_bias: wq, wk, wv and wo have biases; mlp_bias: w1, w2 and w3 have biases.
    rope_scaling_args: None for Llama 2 and 3.0, whose frequencies are not stretched.
    """

    n_kv_heads: int | None = None
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = None
    rope_scaling_args: RoPEScalingArgs | None = field(default_factory=RoPEScalingArgs)
    hidden_dim: int | None = None
    head_dim: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def ffn_hidden_dim(self) -> int:
        """The hidden size of the feed-forward."""
        return self.hidden_dim_by_rule() if self.hidden_dim is None else self.hidden_dim

    def hidden_dim_by_rule(self, n_shares: int = 1) -> int:
        """Return the hidden size of each of `n_shares` feed-forwards by the rule of 8/3 dim.

        A SwiGLU of 8/3 dim has as many parameters as a two-layer network of 4 dim.
        """
        hidden = int(8 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            hidden = int(self.ffn_dim_multiplier * hidden)
        hidden //= n_shares
        return -(-hidden // self.multiple_of) * self.multiple_of

    @property
    def attention_head_dim(self) -> int:
        """The size of an attention head."""
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim
