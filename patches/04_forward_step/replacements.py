"""Functions for `torchtitan.train.Trainer`."""


def forward_step(
    self, *, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the model's output for one batch, and the labels that belong to it.

    forward_backward_step calls this, so an override changes training, too. To score a batch, call it
    under torch.no_grad(). Under context parallelism both results are this rank's part of every
    sequence.

    Under pipeline parallelism it runs the forwards of the schedule. The output is None on ranks without
    the last stage, and training does not call this, because the schedule runs its own forwards.
    """
    inputs, labels, extra_inputs, extra_kwargs = self.post_dataloading_process(input_dict, labels)
    with self.maybe_enable_amp:
        if not self.parallel_dims.pp_enabled:
            assert len(self.model_parts) == 1
            return self.model_parts[0](inputs, **extra_inputs, **extra_kwargs), labels
        with torch.no_grad():
            if self.pp_has_first_stage:
                return self.pp_schedule.eval(inputs, **extra_inputs, **extra_kwargs), labels
            return self.pp_schedule.eval(**extra_kwargs), labels


def forward_backward_step(
    self,
    *,
    input_dict: dict[str, torch.Tensor],
    labels: torch.Tensor,
    global_valid_tokens: torch.Tensor | float,
) -> torch.Tensor:
    """Add a batch's gradients to the parameters', and return its loss / global_valid_tokens.

    Without pipeline parallelism the forward is `forward_step`. With it, ranks without the last stage
    return -1.
    """
    if not self.parallel_dims.pp_enabled:
        with self.train_context():
            pred, labels = self.forward_step(input_dict=input_dict, labels=labels)
            with self.maybe_enable_amp:
                loss = self.loss_fn(pred, labels) / global_valid_tokens
            del pred  # the graph keeps what backward needs; logits are large
            loss.backward()
        return loss

    inputs, labels, extra_inputs, extra_kwargs = self.post_dataloading_process(input_dict, labels)
    losses: list[torch.Tensor] | None = [] if self.pp_has_last_stage else None
    extra_kwargs |= {
        "target": labels if self.pp_has_last_stage else None,
        "losses": losses,
        "return_outputs": False,
    }
    with self.train_context():
        if self.pp_has_first_stage:
            self.pp_schedule.step(inputs, **extra_inputs, **extra_kwargs)
        else:
            self.pp_schedule.step(**extra_kwargs)
    if losses is None:
        return torch.tensor([-1.0], device=self.device)
    return (torch.stack(losses).sum() / global_valid_tokens).to(self.device)
