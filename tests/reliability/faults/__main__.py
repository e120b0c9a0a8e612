"""Print what can go wrong, with cause and remedy: `python -m tests.reliability.faults [WORDS ...]`.

With WORDS, such as a part of a message, only the faults that contain them.
"""

import functools
import sys
import textwrap

from tests.reliability.faults import CHAPTERS, Fault, chapter, says

ABOVE = "As above"


def title_of(module: str, fault: Fault) -> str:
    return f"{module}: {fault.name}"


@functools.cache
def entries() -> dict[str, tuple[str, str]]:
    """Return title -> (the fault's message, all that is printed about it)."""
    found = {}
    for module in CHAPTERS:
        cause = remedy = ""  # of the last fault that has its own
        for fault in chapter(module):
            texts = {"cause": _full(fault.cause, cause), "remedy": _full(fault.remedy, remedy)}
            cause = fault.cause if not fault.cause.startswith(ABOVE) else cause
            remedy = fault.remedy if not fault.remedy.startswith(ABOVE) else remedy
            texts |= {"exit code": str(fault.exit_code)}
            texts |= {"ranks": str(fault.ranks)} if fault.ranks > 1 else {}
            title = title_of(module, fault)
            lines = [title, textwrap.indent(textwrap.dedent(fault.message).strip(), "    ")]
            lines += [f"  {name}: {text}" for name, text in texts.items()]
            found[title] = (fault.message, "\n".join(lines))
    return found


def find(words: str) -> list[str]:
    """Return what is printed about the faults that contain the words, or whose message they contain."""
    found = entries().values()
    return [text for message, text in found if says(text, words) or says(words, message)]


def _full(text: str, above: str) -> str:
    """Return the text, with `above` in place of "As above"."""
    if not text.startswith(ABOVE):
        return text
    further = text.removeprefix(ABOVE).lstrip(".; ")
    is_key = "." in further.partition(" ")[0].rstrip(".")
    return f"{above} {further if is_key else further[:1].upper() + further[1:]}".strip()


if __name__ == "__main__":
    print("\n\n".join(find(" ".join(sys.argv[1:]))) or "no fault contains these words")
