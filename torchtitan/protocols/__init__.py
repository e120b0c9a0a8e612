"""The seams between the trainer and what it trains. Names are imported on first use."""

import importlib
from typing import TYPE_CHECKING, Any

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

_MODULE_OF = {
    "BaseModelArgs": "model",
    "ModelProtocol": "model",
    "ModelConverter": "model_converter",
    "ModelConvertersContainer": "model_converter",
    "BaseStateDictAdapter": "state_dict_adapter",
    "StateDictAdapter": "state_dict_adapter",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
