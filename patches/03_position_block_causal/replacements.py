"""Functions that take the place of those with their names in the modules that unit.toml lists."""


def get_attention_masks(
    self,
    input_batch: torch.Tensor,
    tokenizer: BaseTokenizer,
    extra_inputs: dict[str, torch.Tensor] | None = None,
) -> AttentionMasksType:
    """Return the masks of a batch; see `torchtitan.models.documents`."""
    return attention_masks(self, input_batch, tokenizer, extra_inputs)


def post_dataloading_process(
    self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any], dict[str, Any]]:
    """Prepare a batch for the model: masks, and this rank's part of every sequence.

    Returns (inputs, labels, extra_inputs, extra_kwargs). Only the first pipeline stage gets
    extra_inputs; every stage gets extra_kwargs: "attention_masks" under flex and varlen, and
    "positions", which RoPE reads on every stage. Subclasses may override this.

    A tokenizer is needed only where its end-of-text id separates documents.
    """
    inputs = input_dict["input"]
    extra_inputs = {name: value for name, value in input_dict.items() if name != "input"}
    extra_kwargs: dict[str, Any] = {}
    if getattr(self.model_args, "attn_type", "sdpa") in ("flex", "varlen"):
        extra_kwargs["attention_masks"] = self.model_parts[0].get_attention_masks(
            input_batch=inputs, tokenizer=self.tokenizer, extra_inputs=extra_inputs
        )
    if extra_inputs.get("positions") is not None:
        # Negative positions mark padding, and RoPE's table has no such rows.
        positions = extra_inputs.pop("positions").expand(inputs.shape)
        extra_kwargs["positions"] = positions.clamp(min=0)
    if self.parallel_dims.cp_enabled:
        if "positions" in extra_kwargs:
            raise ValueError(
                "context parallelism numbers a row's positions itself, got 'positions' in the batch; "
                "set parallelism.context_parallel_degree = 1, or leave them out"
            )
        mesh = self.parallel_dims.get_mesh("cp")
        balancer = self.job_config.parallelism.context_parallel_load_balancer
        inputs, labels, extra_kwargs = prepare_context_parallel_input(
            inputs, labels, extra_kwargs, mesh, self.device, balancer
        )
    return inputs, labels, extra_inputs, extra_kwargs
