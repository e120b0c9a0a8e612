"""The interfaces between the trainer and what it trains."""
# ruff: noqa: F401 (torchtitan 0.2.x has these names)

from torchtitan.protocols.model import BaseModelArgs, ModelProtocol
from torchtitan.protocols.model_converter import ModelConverter, ModelConvertersContainer
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter, StateDictAdapter
