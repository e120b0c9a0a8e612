"""The interfaces between the trainer and what it trains."""

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
