"""The table of docs/models.md, from the registry and the tables of the tests.

python -m tests.reference.model_table
"""

from collections import Counter

from tests.distributed.layout_matrix import FAMILIES
from tests.reference.chat_formats import OF_FAMILIES
from tests.reference.families import CASES
from torchtitan.models import _supported_models
from torchtitan.models.hf_config import from_hf_config, hf_types
from torchtitan.protocols.train_spec import get_train_spec

HEAD = ["`model.name`", "sizes", "`model_type`", "compared configs", "chat formats", "layouts"]


def model_table() -> str:
    compared = Counter(from_hf_config(config).family for config in CASES.values())
    in_matrix = Counter(name for name, _, _ in FAMILIES.values())
    rows = [HEAD, ["---"] * len(HEAD)]
    for name in sorted(_supported_models):
        flavors = get_train_spec(name).model_args
        sizes = [f for f in flavors if not f.startswith(("debug", "tiny")) and "_" not in f]
        of_family = {key: kind for key, (family, kind) in hf_types().items() if family == name}
        types = [t for key, kind in of_family.items() for t in (key, *kind.aliases, *kind.inside)]
        columns = [name], sizes, dict.fromkeys(types)
        cells = [", ".join(f"`{entry}`" for entry in column) for column in columns]
        formats = ", ".join(OF_FAMILIES[name])
        rows.append([*cells, str(compared[name]), formats, str(in_matrix[name] or "")])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    print(model_table(), end="")
