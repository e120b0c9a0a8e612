"""Model families. Each is a package with a flavor table and a `get_train_spec()`."""

import pkgutil

_supported_models: frozenset[str] = frozenset(
    module.name for module in pkgutil.iter_modules(__path__) if module.ispkg
) - {"moe"}
