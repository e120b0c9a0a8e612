"""Assigns each parameter the settings of [optimizer], or of a table in [[optimizer.groups]]."""

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from torchtitan.config import Optimizer as OptimizerConfig
from torchtitan.config.job_config import ParameterGroup
from torchtitan.distributed.tied_copies import name_in_whole_model
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.torch_parts import name_without_wrappers


class ParameterGroups:
    """The trainable parameters of model parts, grouped by the first table whose pattern matches the name.

    The tables of [[optimizer.groups]] come first, and then the model's own `parameter_groups`.

    numbers: parameter -> 0 for the group of [optimizer], or n for the group of the n-th table.
    """

    def __init__(self, model_parts: Sequence[nn.Module], config: OptimizerConfig) -> None:
        # A client's own config class may lack this field.
        self.tables: list[ParameterGroup] = [
            *getattr(config, "groups", []),
            *next((getattr(part, "parameter_groups", ()) for part in model_parts), ()),
        ]
        self.names = {
            parameter: name_in_whole_model(part, name_without_wrappers(name))
            for part in model_parts
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        }
        self.numbers = {p: self._number_of(name) for p, name in self.names.items()}

    def _number_of(self, name: str) -> int:
        fitting = (n for n, table in enumerate(self.tables, 1) if re.search(table.pattern, name))
        return next(fitting, 0)

    def of_part(self, part: nn.Module, betas: tuple[float, float]) -> list[dict[str, Any]]:
        """Return torch's parameter groups of a part. A key that a group lacks takes the optimizer's value.

        betas: those of [optimizer]. Every part gets all groups, even if some are empty, so that all parts can
        load the same schedule state.
        """
        groups: list[dict[str, Any]] = [{"params": []}]
        for table in self.tables:
            own = {key: value for key, value in vars(table).items() if value is not None}
            own["betas"] = own.pop("beta1", betas[0]), own.pop("beta2", betas[1])
            del own["pattern"], own["muon"]
            groups.append({"params": [], **own})
        for parameter in part.parameters():
            if parameter in self.numbers:
                groups[self.numbers[parameter]]["params"].append(parameter)
        return groups

    def matrices(self) -> list[nn.Parameter]:
        """Return the parameters for Muon: 2-D and 3-D weights in `layers`, unless a group has muon = false."""
        by_muon = [True, *(table.muon for table in self.tables)]
        return [
            parameter
            for parameter, name in self.names.items()
            if by_muon[self.numbers[parameter]]
            and parameter.ndim in (2, 3)
            and re.search(r"(^|\.)layers\.", name)
            and not name.endswith("bias")
        ]


def check_groups(model: nn.Module, config: OptimizerConfig) -> None:
    """Raise ConfigError if a table in [[optimizer.groups]] gets no parameter, or if Muon gets no matrix."""
    groups = ParameterGroups([model], config)
    for i, table in enumerate(getattr(config, "groups", [])):
        if i + 1 in groups.numbers.values():
            continue
        fitting = [name for name, _ in model.named_parameters() if re.search(table.pattern, name)]
        taken = [name for name in groups.names.values() if re.search(table.pattern, name)]
        problem = (
            f"only parameters that earlier tables take, such as {taken[0]}; move it before them"
            if taken
            else f"only frozen parameters, such as {fitting[0]}; remove it"
            if fitting
            else f"no name of a parameter, such as {', '.join(list(groups.names.values())[:3])}; "
            "correct it"
        )
        raise ConfigError(f"optimizer.groups[{i}].pattern = {table.pattern!r} fits {problem}")
    if config.name == "Muon" and not groups.matrices():
        raise ConfigError(
            "optimizer.name = 'Muon' needs matrices that train in the model's layers, got none; set "
            "it to 'AdamW'"
        )
