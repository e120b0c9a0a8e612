"""Model families. Each is a module with a flavor table and a `get_train_spec()`, here or in `families`."""

import pkgutil

# model.name -> the family's module; a program may add families of its own
module_paths: dict[str, str] = {
    module.name: f"{package}.{module.name}"
    for package, paths in {
        __name__: __path__,
        f"{__name__}.families": [f"{path}/families" for path in __path__],
    }.items()
    for module in pkgutil.iter_modules(paths)
    if package != __name__ or (module.ispkg and module.name not in ("moe", "families"))
}
_supported_models = module_paths.keys()
