"""The process that runs chat templates: a line of JSON in, a line of JSON out, within limits of time and memory.

Run as a script, without the rest of the package, by template_process.py. A template is its author's program: what it
can take from us is this process, which can open nothing once it has started.
"""

import json
import sys

if __name__ == "__main__":  # what the parent imports from is where jinja2 is, whatever this Python would look for
    sys.path[:] = json.loads(sys.argv[1])

import contextlib
import functools
import signal
from datetime import datetime
from typing import Any, ClassVar

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS, MEMORY = 0.5, 512 << 20  # of processor time per text, a hundred times what one takes; of address space in all
LONGEST = 16 << 20  # characters of a text
_SHOWN = 500  # characters of an error


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks assistant text for training, as a plain block."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]  # jinja2 says nothing of ClassVar

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def environment() -> ImmutableSandboxedEnvironment:
    """What templates are written for: the functions and filters of `transformers`, in Jinja's sandbox."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    # Jinja's own tojson escapes HTML characters, which would change prompts.
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _reply(compiled: Any, request: str | bytes) -> dict[str, str]:
    try:
        asked = json.loads(request)
        text = compiled(asked["template"]).render(**asked["variables"])
    except BaseException as error:  # it may fail in any way
        with contextlib.suppress(Exception):
            return {"error": (str(error) or type(error).__name__)[:_SHOWN]}
        return {"error": type(error).__name__}
    if len(text) > LONGEST:
        return {"error": f"it made {len(text)} characters, expected at most {LONGEST}"}
    return {"text": text}


def _confine() -> None:
    """From here on nothing can be opened, written to a file or started, and memory ends somewhere."""
    import resource  # POSIX only, as this process is

    limits = {"RLIMIT_AS": MEMORY, "RLIMIT_NOFILE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_NPROC": 0, "RLIMIT_CORE": 0}
    for name, most in limits.items():
        with contextlib.suppress(AttributeError, ValueError, OSError):  # systems without one of them
            resource.setrlimit(getattr(resource, name), (most, most))


def main() -> None:
    compiled = functools.lru_cache(maxsize=8)(environment().from_string)
    sample = "{{ strftime_now('%d %b %Y') }}{% for m in [1] %}{{ loop.length }}{% endfor %}{{ [1] | tojson }}"
    compiled(sample).render()  # loads now what could not be opened later: modules, time zone
    _reply(compiled, '{"template": "{{ 1 / 0 }}", "variables": {}}')  # and what errors need
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    _confine()
    for request in requests:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process, in the midst of any operation
        reply = json.dumps(_reply(compiled, request), ensure_ascii=False).encode("utf-8", "surrogatepass")
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(reply + b"\n")
        replies.flush()


if __name__ == "__main__":
    main()
