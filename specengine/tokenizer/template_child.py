"""The process that runs chat templates, within limits of time and memory: one line of JSON in, one line out.

template_process.py runs this file as a script, without the rest of the package. A template is an untrusted program.
Once this process has started, it can open no file and no connection.
"""

import json
import sys

if __name__ == "__main__":  # the parent's path, so that this process imports the parent's jinja2
    sys.path[:] = json.loads(sys.argv[1])

import contextlib
import functools
import signal
from datetime import datetime
from typing import Any, ClassVar

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 0.5  # processor time per text, a hundred times the need of a usual template
MEMORY = 512 << 20  # bytes of address space
LONGEST = 16 << 20  # characters of a text
_SHOWN = 500  # characters of an error


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks assistant text for training, as a plain block."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]  # jinja2 does not declare it as ClassVar

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def environment() -> ImmutableSandboxedEnvironment:
    """Makes Jinja's sandbox with the functions and filters that `transformers` gives to templates."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    # Jinja's own tojson escapes HTML characters, which would change prompts.
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env


def _render(compiled: Any, request: str | bytes) -> dict[str, str]:
    try:
        message = json.loads(request)
        text = compiled(message["template"]).render(**message["variables"])
    except BaseException as error:  # a template can raise anything
        with contextlib.suppress(Exception):
            return {"error": (str(error) or type(error).__name__)[:_SHOWN]}
        return {"error": type(error).__name__}
    if len(text) > LONGEST:
        return {"error": f"the text has {len(text)} characters, expected at most {LONGEST}"}
    return {"text": text}


def _confine() -> None:
    """Limits memory, and forbids this process to open or write files and to start processes."""
    import resource  # exists on POSIX only

    limits = {"RLIMIT_AS": MEMORY, "RLIMIT_NOFILE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_NPROC": 0, "RLIMIT_CORE": 0}
    for name, most in limits.items():
        with contextlib.suppress(AttributeError, ValueError, OSError):  # some systems lack a limit
            resource.setrlimit(getattr(resource, name), (most, most))


def main() -> None:
    """Renders the requests on stdin until it ends."""
    compiled = functools.lru_cache(maxsize=8)(environment().from_string)
    sample = "{{ strftime_now('%d %b %Y') }}{% for m in [1] %}{{ loop.length }}{% endfor %}{{ [1] | tojson }}"
    # Modules and the time zone are loaded now, because no file can be opened later.
    compiled(sample).render()
    _render(compiled, '{"template": "{{ 1 / 0 }}", "variables": {}}')
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    _confine()
    for request in requests:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends the process in any operation
        reply = json.dumps(_render(compiled, request), ensure_ascii=False).encode("utf-8", "surrogatepass")
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(reply + b"\n")
        replies.flush()


if __name__ == "__main__":
    main()
