"""The seams between the trainer and what it trains. Names are imported on first use."""

from typing import TYPE_CHECKING

from torchtitan.tools.lazy_names import load_on_access

if TYPE_CHECKING:
    from torchtitan.protocols.model import BaseModelArgs, ModelProtocol
    from torchtitan.protocols.model_converter import ModelConverter, ModelConvertersContainer
    from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter, StateDictAdapter

__all__ = [
    "BaseModelArgs",
    "BaseStateDictAdapter",
    "ModelConverter",
    "ModelConvertersContainer",
    "ModelProtocol",
    "StateDictAdapter",
]

__getattr__ = load_on_access(
    __name__,
    {
        "BaseModelArgs": ".model",
        "ModelProtocol": ".model",
        "ModelConverter": ".model_converter",
        "ModelConvertersContainer": ".model_converter",
        "BaseStateDictAdapter": ".state_dict_adapter",
        "StateDictAdapter": ".state_dict_adapter",
    },
)
