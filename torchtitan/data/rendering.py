"""Renders chat templates with Jinja, in a process whose time and memory `tools.bounded` limits.

Jinja's sandbox stops a template from changing objects and from reading their internal attributes. A
template gets no date and no random numbers, so a prompt is always rendered the same.
"""

import contextlib
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, ext, nodes, sandbox

_MOST_CHARACTERS = 2**24  # limit per rendered text; a million tokens are about 2**22 characters


class _Generation(ext.Extension):
    """The tag {% generation %}: writes two variables, empty by default, around the tag's content."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        self.environment.extend(marks_generation=True)
        line = next(parser.stream).lineno
        content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (
            nodes.Output([nodes.Name(name, "load")], lineno=line)
            for name in ("_begin_generation", "_end_generation")
        )
        # A scope, as in transformers: a variable that is set inside is undefined afterwards.
        return nodes.Scope([begin, *content, end], lineno=line)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _refuse_chance(*_: Any) -> NoReturn:
    raise TemplateError("random texts would differ between processes and runs; write a fixed text")


def _same_everywhere(value: Any) -> Any:
    if type(value) is not str and (callable(value) or hasattr(value, "__next__")):
        if " at 0x" in str(value):
            raise TemplateError(f"it writes {value}, whose text differs between processes")
    return value


def _to_json(value: Any, **options: Any) -> str:
    # Replaces Jinja's own filter, which escapes HTML.
    return json.dumps(value, **{"ensure_ascii": False} | options)


@functools.lru_cache(16)
def _compiled(source: str) -> Template:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, ext.loopcontrols],
        finalize=_same_everywhere,
    )
    environment.filters |= {"tojson": _to_json, "random": _refuse_chance}
    environment.globals |= {"raise_exception": _refuse, "lipsum": _refuse_chance}
    return environment.from_string(source)


def marks_generation(source: str) -> bool:
    """Return whether a template has {% generation %}; raises Jinja's error for an invalid template."""
    return hasattr(_compiled(source).environment, "marks_generation")


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Return a template rendered with `variables`; raises whatever its expressions raise."""
    text = _compiled(source).render(variables)
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(
            f"its output has {len(text):,} characters; the limit is {_MOST_CHARACTERS:,}"
        )
    return text


def render_beginnings(
    source: str, variables: Mapping[str, Any], beginnings: Sequence[tuple[int, bool]]
) -> list[str | None]:
    """Return, for each (n, add_generation_prompt), the first n messages rendered; None if that fails."""
    texts: list[str | None] = [None] * len(beginnings)
    for i, (n, header) in enumerate(beginnings):
        chat = {"messages": variables["messages"][:n], "add_generation_prompt": header}
        with contextlib.suppress(Exception):  # expressions in a template may raise any exception
            texts[i] = render(source, {**variables, **chat})
    return texts
