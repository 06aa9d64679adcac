"""A Jinja environment for templates that strangers wrote: sandboxed, and bounded in time and memory.

A chat template comes with the model's weights and runs in the API process. Jinja's sandbox keeps it from Python's
internals, but would let it loop for ever or build a string of 2^40 letters. Here

  - every turn of a loop and every call of a macro is counted, against a number and against the clock;
  - what can make a string or list much longer than its parts (+ * ~ % format replace join ...) is measured first;
  - the output is counted as it is made.

What goes beyond a bound raises TemplateRuntimeError.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import TemplateError, TemplateRuntimeError, filters, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TURNS = 300_000
"""Turns of loops and calls of macros in one rendering, together."""
MAX_SECONDS = 10.0
MAX_LEN = 32 * 2**20
"""Letters in a string, items in a list, letters of the output."""
MAX_INT_BITS = 4096
MAX_WIDTH = 4096
"""Letters that padding and indentation may add."""

_BUDGET = "\0budget"  # no template can name it
_WIDE_FORMAT = re.compile(r"\d{5,}|\{[^{}]*\{|%[^a-zA-Z%]*\*")
_PADDING = frozenset(("ljust", "rjust", "center", "zfill", "expandtabs"))
# Not in any known chat template, and each can make much of little.
_UNUSED_FILTERS = ("center", "batch", "slice", "wordwrap", "urlize", "pprint", "filesizeformat", "random")
_UNUSED_GLOBALS = ("lipsum", "cycler", "joiner")


class RefusedError(TemplateError):
    """The template called `raise_exception`: its message is for the user."""


class _Budget:
    """What one rendering has used."""

    def __init__(self) -> None:
        self._turns = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def take_turn(self) -> None:
        self._turns += 1
        if self._turns > MAX_TURNS:
            raise TemplateRuntimeError(f"it loops more than {MAX_TURNS} times")
        if time.monotonic() > self._deadline:
            raise TemplateRuntimeError(f"it takes more than {MAX_SECONDS:.0f} s")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for (as transformers sets it up), with bounds."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"], cache_size=0
        )
        self.filters["tojson"] = _tojson
        self.filters["indent"] = _indent
        self.filters["format"] = self._format
        self.filters["replace"] = self._replace
        self.filters["join"] = self._join
        for name in _UNUSED_FILTERS:
            del self.filters[name]
        for name in _UNUSED_GLOBALS:
            del self.globals[name]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        # Called by the nodes that `compile_bounded` puts into a template.
        self.take_turn = _take_turn
        self.concat_bounded = _concat

    def compile_bounded(self, tree: nodes.Template) -> jinja2.Template:
        """The template of a syntax tree from `parse`, which is changed, with turns counted."""
        _Counting(self).visit(tree)
        code = jinja2.Environment.compile(self, tree)
        return jinja2.Template.from_code(self, code, self.make_globals(None))

    def render_bounded(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """The output of `template`. Raises what Jinja raises, and TemplateRuntimeError beyond a bound."""
        parts, num_letters = [], 0
        for part in template.generate(variables | {_BUDGET: _Budget()}):
            num_letters += len(part)
            if num_letters > MAX_LEN:
                raise TemplateRuntimeError(f"its output has more than {MAX_LEN} letters")
            parts.append(part)
        return "".join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _check_len(_len(left) + _len(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if operator != "%" and bits > MAX_INT_BITS:
                raise TemplateRuntimeError(f"it makes a number of more than {MAX_INT_BITS} bits")
        elif operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    _check_len(_len(items) * times)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            if name in _PADDING:
                _check_width(args[0] if args else kwargs.get("tabsize", 0))
            elif name == "replace":
                _check_replace(owner, *args[:2])
            elif name == "join":
                return _join_bounded(owner, list(args[0]))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        _check_format(str(value))
        return filters.do_format(str(value), *args, **kwargs)

    @staticmethod
    @jinja2.pass_eval_context
    def _replace(context: nodes.EvalContext, value: Any, old: str, new: str, count: int | None = None) -> str:
        _check_replace(str(value), old, new)
        return filters.do_replace(context, str(value), old, new, count)

    @staticmethod
    @jinja2.pass_environment
    def _join(environment: jinja2.Environment, value: Any, d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            value = map(filters.make_attrgetter(environment, attribute), value)
        return _join_bounded(str(d), list(value))


class _Counting(jinja2.visitor.NodeTransformer):
    """Puts a count into the bodies of loops, macros and blocks, and a measured function in the place of `~`."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        self._environment = environment

    def _counted(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        count = nodes.ExprStmt(self._call("take_turn", []))
        node.body.insert(0, count.set_lineno(node.lineno).set_environment(self._environment))
        return node  # type: ignore[no-any-return]

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _counted

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("concat_bounded", node.nodes).set_lineno(node.lineno).set_environment(self._environment)

    def _call(self, name: str, args: list[nodes.Expr]) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), [nodes.ContextReference(), *args], [], None, None)


class _GenerationTag(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks the model's own words for training: here, just its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _take_turn(context: Context) -> None:
    context.parent[_BUDGET].take_turn()


def _concat(context: Context, *parts: Any) -> str:
    texts = [str(part) for part in parts]
    _check_len(sum(map(len, texts)))
    return "".join(texts)


def _raise_exception(message: object) -> None:
    raise RefusedError(str(message))


def _strftime_now(format: str) -> str:
    _check_format(format)
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not Jinja's own: that one writes < > & ' as escapes for HTML.
    _check_width(indent or 0)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _check_width(width if isinstance(width, int) else len(width))
    _check_len(len(value) + (value.count("\n") + 1) * (width if isinstance(width, int) else len(width)))
    return filters.do_indent(value, width, first, blank)


def _join_bounded(separator: str, items: list[Any]) -> str:
    texts = [str(item) for item in items]
    _check_len(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


def _check_replace(text: str, old: object = "", new: object = "") -> None:
    if isinstance(old, str) and isinstance(new, str):
        _check_len(len(text) + text.count(old) * len(new))


def _check_format(format: str) -> None:
    if _WIDE_FORMAT.search(format):
        raise TemplateRuntimeError("it formats with a width that is computed or has more than 4 digits")


def _check_width(width: object) -> None:
    if isinstance(width, int) and width > MAX_WIDTH:
        raise TemplateRuntimeError(f"it pads or indents by {width} letters: at most {MAX_WIDTH} are allowed")


def _check_len(length: int) -> None:
    if length > MAX_LEN:
        raise TemplateRuntimeError(f"it makes a text or list of more than {MAX_LEN} items")


def _len(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | range) else 0
