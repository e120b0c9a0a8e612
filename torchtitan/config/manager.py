"""Reads a job's config. Command-line flags override a TOML file, which overrides the defaults."""

import contextlib
import dataclasses
import functools
import inspect
import io
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import tomli
import tyro

from torchtitan.config.checks.common import import_named, is_path
from torchtitan.config.job_config import JobConfig
from torchtitan.config.toml_values import with_values
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.files import open_file
from torchtitan.tools.host import has_peers
from torchtitan.tools.logging import logger


class TomlSyntaxError(tomli.TOMLDecodeError, tomllib.TOMLDecodeError):
    """A TOML file cannot be parsed. Callers may catch the error of tomli or of tomllib."""

    def __init__(self, path: str, line: int, reason: object) -> None:
        # Bypasses the constructors of TOMLDecodeError, which need the file's text.
        ValueError.__init__(self, f"{path}, line {line}: not valid TOML: {reason}")


class ConfigManager:
    """Parses a command line, and the TOML file it names, into a `config_cls`.

    A job can extend `config_cls` with `job.custom_config_module`.
    """

    def __init__(self, config_cls: type[JobConfig] = JobConfig) -> None:
        self.config_cls = config_cls
        self.config: JobConfig = config_cls()
        self.register_tyro_rules(custom_registry)

    def parse_args(
        self, args: list[str] | None = None, values: dict[str, Any] | None = None
    ) -> JobConfig:
        """Return the config that `args` (default: this process's arguments) describe.

        values: section -> key -> value, in place of a TOML file.
        Flags override the TOML file, which overrides the defaults. Calls are independent.
        Raises FileNotFoundError, TOMLDecodeError or ConfigError for the file. For a mistake in the flags,
        prints a message (with several ranks `exit_on_config_error` prints it) and raises SystemExit(2).
        """
        args = sys.argv[1:] if args is None else args
        toml_values = self._maybe_load_toml(args) if values is None else values
        config_cls = self._maybe_add_custom_config(args, toml_values)
        try:
            base = self._dict_to_dataclass(config_cls, toml_values or {})
        except ConfigError as error:
            path = _flag_value(args, "job", "config_file")
            where = f" (in {path}; `{_program()} --help` lists all keys)"
            raise ConfigError(str(error) + where, error.sentence + where) from error
        parser_output = io.StringIO()
        hides_help = os.environ.get("RANK", "0") != "0" and {"-h", "--help"} & set(args)
        try:
            with contextlib.redirect_stderr(parser_output):
                self.config = tyro.cli(
                    config_cls,
                    default=base,
                    args=args,
                    prog=_program(),
                    registry=custom_registry,
                    use_underscores=True,  # messages spell keys as in TOML; flags with dashes still work
                    console_outputs=not hides_help,
                )
        except AssertionError as error:  # raised by a section's __post_init__
            raise ConfigError(str(error)) from error
        except SystemExit as error:
            if not error.code:
                raise
            message = _sentence_in(parser_output.getvalue())
            if has_peers():  # the caller prints the message, once for all ranks
                raise _FlagMistake(message) from error
            print(message, file=sys.stderr)
            raise
        _expand_home(self.config)
        self._validate_config()
        return self.config

    def _maybe_load_toml(self, args: list[str]) -> dict[str, Any] | None:
        path = _flag_value(args, "job", "config_file")
        if path is None:
            return None
        path = os.path.expanduser(path)
        try:
            with open_file(path, "rb") as toml_file:
                content = toml_file.read()
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"job.config_file names a TOML file that has to exist, got {path!r} "
                f"(looked in {os.getcwd()}); correct the path"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"job.config_file names a TOML file that has to be readable, got {path!r}: "
                f"{error.strerror}"
            ) from error
        try:
            return tomli.loads(content.decode())
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise TomlSyntaxError(path, line, "the file is not UTF-8 text") from error
        except tomli.TOMLDecodeError as error:
            raise TomlSyntaxError(path, error.lineno, error) from error
        except (RecursionError, ValueError) as error:  # ValueError: an integer has too many digits
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise ConfigError(f"{path} cannot be read: {reason}") from error

    def _maybe_add_custom_config(
        self, args: list[str], toml_values: dict[str, Any] | None
    ) -> type[JobConfig]:
        def value_of(section: str, key: str) -> Any:
            table = (toml_values or {}).get(section)
            in_toml = table.get(key) if isinstance(table, dict) else None
            return _flag_value(args, section, key) or in_toml

        module_name = value_of("job", "custom_config_module")
        module_name = module_name or value_of("experimental", "custom_args_module")
        if not (module_name and isinstance(module_name, str)):  # a later check reports a wrong type
            return self.config_cls
        module = import_named("job.custom_config_module", module_name)
        custom_cls = getattr(module, "JobConfig", None)
        if not dataclasses.is_dataclass(custom_cls):
            raise ConfigError(
                f"job.custom_config_module names a module with a dataclass JobConfig, got "
                f"{module_name!r}, which has none; define it there"
            )
        return self._merge_configs(self.config_cls, custom_cls)

    @staticmethod
    def _merge_configs(base: Any, custom: Any) -> type:
        """Return a dataclass with the fields of both; `custom` overrides `base`. Sections are merged likewise."""
        base_types, custom_types = (get_type_hints(c, include_extras=True) for c in (base, custom))
        merged: list[tuple[str, Any, Any]] = []
        for field in dataclasses.fields(custom):
            base_kind, kind = base_types.get(field.name), custom_types[field.name]
            default: Any = field.default
            factory: Any = field.default_factory
            if dataclasses.is_dataclass(kind) and dataclasses.is_dataclass(base_kind):
                kind = factory = ConfigManager._merge_configs(base_kind, kind)
                default = dataclasses.MISSING
            elif default is dataclasses.MISSING and factory is dataclasses.MISSING:
                if not dataclasses.is_dataclass(kind):
                    raise ConfigError(
                        "every key of a custom config needs a default value, got none for "
                        f"{field.name!r}; add one"
                    )
                factory = kind
            options = {"default": default, "default_factory": factory, "metadata": field.metadata}
            merged.append((field.name, kind, dataclasses.field(**options)))
        # A class made here has no source, so the parser takes its help texts from the docstring.
        help_texts = "\n".join(f":param {key}: {text}" for key, text in _help_texts(base).items())
        return dataclasses.make_dataclass(
            f"Merged{base.__name__}", merged, bases=(base,), namespace={"__doc__": help_texts}
        )

    def _dict_to_dataclass(self, cls: type, data: dict[str, Any]) -> Any:
        return with_values(cls(), data) if dataclasses.is_dataclass(cls) else data

    def _validate_config(self) -> None:
        """Copy values of deprecated keys to their new keys; refuse a tokenizer.model file."""
        job, model = self.config.job, self.config.model
        if old_name := self.config.experimental.custom_args_module:
            logger.warning(
                "experimental.custom_args_module is deprecated, use job.custom_config_module"
            )
            job.custom_config_module = job.custom_config_module or old_name
        if model.tokenizer_path:
            logger.warning("model.tokenizer_path is deprecated, use model.hf_assets_path")
            model.hf_assets_path = model.tokenizer_path
        if os.path.exists(model.hf_assets_path) and model.hf_assets_path.endswith(
            "tokenizer.model"
        ):
            raise ConfigError(
                f"model.hf_assets_path must be a folder with Hugging Face tokenizer files, got "
                f"the file {model.hf_assets_path!r}; fetch the folder with "
                "`hf download OWNER/NAME --local-dir FOLDER`"
            )

    @staticmethod
    @functools.cache  # register once, because the parser tries every rule on every key
    def register_tyro_rules(registry: tyro.constructors.ConstructorRegistry) -> None:
        """Add the rules for flags of lists, `a,b`, and of tables, `dim=64, n_layers=2`."""

        def read_table(arguments: list[str]) -> dict[str, Any]:
            text = arguments[0] if arguments[0].startswith("{") else f"{{{arguments[0]}}}"
            return tomli.loads(f"table = {text}")["table"]

        comma_separated = tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="A,B,C,...",
            instance_from_str=lambda arguments: arguments[0].split(","),
            is_instance=lambda value: (
                isinstance(value, list) and all(isinstance(item, str) for item in value)
            ),
            str_from_instance=lambda value: [",".join(value)],
        )
        inline_table = tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="KEY=VALUE,...",
            instance_from_str=read_table,
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [json.dumps(value)],
        )

        @registry.primitive_rule
        def rule(
            type_info: tyro.constructors.PrimitiveTypeInfo,
        ) -> tyro.constructors.PrimitiveConstructorSpec | None:
            if type_info.type == list[str]:
                return comma_separated
            return inline_table if type_info.type == dict[str, Any] else None


custom_registry = tyro.constructors.ConstructorRegistry()


def parse_args_or_exit(
    args: list[str] | None = None, config_cls: type[JobConfig] = JobConfig
) -> JobConfig:
    """Return the config of `ConfigManager.parse_args`; on a mistake, print a message and exit with 2."""
    with exit_on_config_error():
        return ConfigManager(config_cls).parse_args(args)


@contextlib.contextmanager
def exit_on_config_error(tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """Turn the exception of a config mistake into one message on stderr and exit code 2.

    tell: called with the message instead of printing it, e.g. to print once for several ranks.
    """
    try:
        yield
        return
    except (ValueError, FileNotFoundError) as error:
        message = f"config error: {getattr(error, 'sentence', error)}"
    except _FlagMistake as error:
        message = error.message
    if tell is not None:
        tell(message)
    else:
        prefix = f"rank {os.environ['RANK']}: " if has_peers() else ""
        print(prefix + message, file=sys.stderr)
    raise SystemExit(2)


def _program() -> str:
    """Return the command of this program, for messages that point to its --help."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or sys.argv[0].startswith("torchtitan "):
        return sys.argv[0]
    return f"python -m {spec.name.removesuffix('.__main__')}"


class _FlagMistake(SystemExit):
    """The exit after a mistake in the flags. Holds the parser's message, which is not printed yet."""

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message


def _flag_value(args: list[str], section: str, key: str) -> str | None:
    """Return the value of the last `--section.key VALUE` or `--section.key=VALUE`, if there is one."""
    flags = (f"--{section}.{key}", f"--{section}.{key.replace('_', '-')}")
    value = None
    for argument, following in zip(args, [*args, None][1:], strict=True):
        flag, equals, text = argument.partition("=")
        if flag in flags:
            value = text if equals else following
    return value


def _sentence_in(box: str) -> str:
    """Return the parser's message about a flag, and the flags that it suggests, as one line."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()[1:]  # remove colours and the title
    lines = ["\n" if set(line) <= set("─-│╭╮╰╯ ") else line.strip("│ ") for line in lines]
    problem, _, hints = " ".join(lines).strip().partition("\n")
    sentence, is_unknown = re.subn("^Unrecognized options: (.*)", r"\1 is unknown", problem.strip())
    if sentence in ("True is unknown", "False is unknown"):
        sentence += (
            "; a switch takes no value, as in --checkpoint.enable and --checkpoint.no_enable"
        )
    elif is_unknown and "Perhaps you meant" in hints:
        flags = re.findall(r"--[a-z][\w.-]+", hints.partition("For full helptext")[0])
        sentence += f", did you mean {' or '.join(flags[:4])}?"
    return f"config error: {sentence} (`{_program()} --help` lists all keys)"


def _expand_home(section: Any) -> None:
    """Expand a leading `~` of paths, in place, because a shell does not expand it after `=`."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            _expand_home(value)
        elif isinstance(value, str) and is_path(field.name):
            setattr(section, field.name, os.path.expanduser(value))


def _help_texts(section: type) -> dict[str, str]:
    """Return key -> the comment after or above the key; {} for a class without source code."""
    texts, above, source = {}, [], ""
    with contextlib.suppress(OSError, TypeError):
        source = inspect.getsource(section)
    for line in source.splitlines():
        code, _, comment = line.strip().partition("# ")
        if comment and not code:
            above.append(comment)
            continue
        if key := re.match(r"(\w+): ", code):
            texts[key[1]] = comment or " ".join(above)
        above = []
    return texts


if __name__ == "__main__":
    config = parse_args_or_exit()
    try:
        from rich import print  # noqa: A004
    except ImportError:
        logger.warning("rich is not installed, so the config is printed plainly: pip install rich")
    print(config)
