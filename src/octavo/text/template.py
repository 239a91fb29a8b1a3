"""Chat templates compiled in Jinja's sandbox, with the extensions that Transformers gives them."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes as nodes
import jinja2.sandbox
from jinja2.parser import Parser
from jinja2.utils import Namespace

from octavo.errors import RequestError


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which the models never saw.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _Dict:
    """The builtin's constructor and `fromkeys`, without the class object that leads to the interpreter."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace()` that stores no underscore names, by which a template could reach Python's internals."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: it begins with '_'")


class ChatTemplate:
    """One compiled template.

    Attributes:
        variables: names it reads from outside, such as `messages`, `tools`, `enable_thinking`.
        reads_parts: whether it loops over a message's content; otherwise content must be a string.
    """

    def __init__(self, source: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.globals["dict"] = _Dict()
        environment.globals["namespace"] = _Namespace
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise RequestError(f"chat_template: not a valid Jinja template ({error!s:.500})") from error
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        self.reads_parts = _loops_over_content(tree)

    def render(self, **variables: Any) -> str:
        """The rendered text; RequestError with the template's own message if it refuses the input."""
        try:
            return self._template.render(**variables)
        except jinja2.TemplateError as error:
            raise RequestError(f"messages: the chat template refused them: {error!s:.500}") from error
        except Exception as error:  # a template is a program from outside: any fault is this request's alone
            raise RequestError(
                f"messages: the chat template failed on them ({type(error).__name__}: {error!s:.500})"
            ) from error


@lru_cache(maxsize=32)
def compile_template(source: str) -> ChatTemplate:
    """The compiled template, kept: a server renders the same one for every request."""
    return ChatTemplate(source)


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether some loop runs over `x.content`, or over a name that was set from it."""
    aliases = {
        assignment.target.name
        for assignment in tree.find_all(nodes.Assign)
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node)
    }
    return any(
        _is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in aliases)
        for loop in tree.find_all(nodes.For)
    )


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    )
