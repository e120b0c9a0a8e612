"""The seams between the trainer and what it trains. Names are imported on first use."""

from torchtitan.tools.lazy_names import load_on_access

_MODULE_OF = {
    "BaseModelArgs": ".model",
    "ModelProtocol": ".model",
    "ModelConverter": ".model_converter",
    "ModelConvertersContainer": ".model_converter",
    "BaseStateDictAdapter": ".state_dict_adapter",
    "StateDictAdapter": ".state_dict_adapter",
}
__all__ = list(_MODULE_OF)
__getattr__ = load_on_access(__name__, _MODULE_OF)
