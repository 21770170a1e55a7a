"""A bound on the work that one rendering of a chat template may do.

jinja2's sandbox keeps a template from Python's internals, not from looping for ever or from filling the memory. Here
every operation that can loop or grow pays for its size before it happens: loop bodies and macros by their length, texts
by theirs, repetition and padding by what they would make. The sum is a count, not a time, so that the same template and
conversation always fare alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final

from jinja2 import Template, nodes
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_LEAST: Final = 50_000_000
"""Units that every rendering may spend: one or two seconds."""

_PER_CHARACTER: Final = 200
"""Further units for each character of the conversation and the template's other variables."""

_NODE: Final = 10
"""Units of one node of the template's syntax tree, each time that it may run."""

_GROWING: Final = frozenset(
    ("batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "replace", "rjust", "slice")
) | frozenset(("tojson", "translate", "wordwrap", "xmlattr", "zfill"))
"""Filters and methods whose result may be larger than everything that they are given."""

_SHALLOW: Final = frozenset(
    ("attr", "count", "d", "default", "dictsort", "first", "items", "last", "length", "list", "map", "reverse")
) | frozenset(("reject", "rejectattr", "select", "selectattr"))
"""Filters that look at the items of what they are given and not into them."""

_COMPARING: Final = frozenset(
    ("==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le", ">", "gt", "greaterthan", ">=", "ge", "in")
)

_SEARCHING: Final = frozenset(("changed", "count", "index"))
"""Methods that compare."""

_STEP: Final = 100
"""Units of what costs time and makes nothing: a turn of a loop, a call, a filter."""

_INFINITE: Final = 1 << 62

_left: ContextVar[list[int]] = ContextVar("units left in this rendering")


class BudgetSpent(Exception):
    """A template has asked for more work than its conversation can need."""


@contextmanager
def budget(variables: Mapping[str, Any]) -> Iterator[None]:
    """Renderings inside may spend what `variables`, the template's, are worth."""
    token = _left.set([_LEAST + _PER_CHARACTER * _weight(variables, _INFINITE)])
    try:
        yield
    finally:
        _left.reset(token)


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates pay for what they do; render them inside `budget`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # Folding constants would do the work of `'x' * 10**10` when the template is compiled.
        super().__init__(*arguments, optimized=False, **options)
        self.globals.pop("lipsum")
        for name, function in self.filters.items():
            self.filters[name] = _paying(name, function)
        # Of the environment's attributes only the syntax tree can name these; a template cannot.
        self.pay, self.pay_for, self.pay_for_items = _pay, _pay_for, _pay_for_items
        for name in _COMPARING & self.tests.keys():
            self.tests[name] = _paying(name, self.tests[name])

    def replace_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Have another filter of this name; it pays as the old one did."""
        self.filters[name] = _paying(name, function)

    def metered(self, source: str) -> Template:
        """The template, compiled so that loops, outputs and comparisons pay.

        Raises:
            jinja2.TemplateSyntaxError: It is not Jinja.
        """
        tree = self.parse(source)
        _meter(tree)
        tree.set_environment(self)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if __obj is not _pay and __obj is not _pay_for and __obj is not _pay_for_items:
            given = [*args, *(value for name, value in kwargs.items() if not name.startswith("_"))]
            name = getattr(__obj, "__name__", "")
            receiver = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
            _charge(_STEP)
            if name in _GROWING:
                _charge(_growth(receiver, given))
            elif not (isinstance(__obj, Macro) or __obj is Namespace):
                _charge(_weight(receiver) if name in _SEARCHING else _length(receiver))
                _pay_for(given)
                _charge(sum(map(_widths, given)))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _charge(_operation(operator, left, right))
        return super().call_binop(context, operator, left, right)


def _pay(units: int) -> bool:
    """Spend units; True."""
    _charge(units)
    return True


def _pay_for(value: Any) -> Any:
    """Spend what a value is worth, with everything in it; the value."""
    _charge(_weight(value))
    return value


def _pay_for_items(value: Any) -> Any:
    """Spend the number of a value's items; the value."""
    _charge(_length(value))
    return value


def _meter(tree: nodes.Template) -> None:
    """Rewrite a syntax tree so that it pays."""
    # What is found is collected first: what is put in must not be found.
    bodies: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
    costs = [_cost(each.body) for each in bodies]
    outputs, concatenations = list(tree.find_all(nodes.Output)), list(tree.find_all(nodes.Concat))
    comparisons = list(tree.find_all(nodes.Compare))
    slices = [each for each in tree.find_all(nodes.Getitem) if isinstance(each.arg, nodes.Slice)]
    for block, cost in zip(bodies, costs, strict=True):
        units = nodes.Const(cost, lineno=block.lineno)
        block.body.insert(0, nodes.ExprStmt(_called("pay", units), lineno=block.lineno))
        if isinstance(block, nodes.For) and block.test is not None:
            block.test = nodes.And(_called("pay", nodes.Const(_STEP, lineno=block.lineno)), block.test)
            block.test.set_lineno(block.lineno)
    for output in outputs:
        output.nodes = [
            each if isinstance(each, nodes.TemplateData) else _called("pay_for", each) for each in output.nodes
        ]
    for concatenation in concatenations:
        concatenation.nodes = [_called("pay_for", each) for each in concatenation.nodes]
    for comparison in comparisons:
        comparison.expr = _called("pay_for", comparison.expr)
        for operand in comparison.ops:
            operand.expr = _called("pay_for", operand.expr)
    for each in slices:
        each.node = _called("pay_for_items", each.node)


def _called(method: str, argument: nodes.Expr) -> nodes.Call:
    function = nodes.EnvironmentAttribute(method, lineno=argument.lineno)
    return nodes.Call(function, [argument], [], None, None, lineno=argument.lineno)


def _cost(body: Iterable[nodes.Node]) -> int:
    """Units of running statements once, without what is paid for elsewhere."""
    units = _STEP
    for statement in body:
        for node in (statement, *statement.find_all(nodes.Node)):
            units += _NODE + (len(node.data) if isinstance(node, nodes.TemplateData) else 0)
    return units


def _paying(name: str, function: Any) -> Callable[..., Any]:
    """A filter or test that pays; its first argument may be jinja2's context, which weighs nothing."""

    @wraps(function)
    def paying(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if passes_context:
            del given[0]
        _charge(_STEP)
        if name in _GROWING:
            _charge(_growth(given[0] if given else None, given[1:]))
        elif name in _SHALLOW:
            _charge(_length(given[0]) if given else 0)
        else:
            _pay_for(given)
        return function(*args, **kwargs)

    passes_context = hasattr(function, "jinja_pass_arg")
    return paying


def _operation(operator: str, left: Any, right: Any) -> int:
    """Units of a binary operation."""
    if operator == "%" and isinstance(left, str):
        return _growth(left, [right])
    if isinstance(left, int) and isinstance(right, int):
        digits = 1 + left.bit_length() // 30, 1 + right.bit_length() // 30
        if operator == "**":
            return (digits[0] * max(right, 1)) ** 2
        return digits[0] * digits[1]
    if operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(count, int):
                return 1 + len(sequence) * max(count, 0)
    return 1 + _length(left) + _length(right)


def _growth(value: Any, given: Iterable[Any]) -> int:
    """No less than what a growing filter or method makes of `value` and the other arguments."""
    own = 1 + _weight(value) + _widths(value)
    return own * (1 + sum(_widths(each) + _weight(each) for each in given))


def _widths(value: Any) -> int:
    """What a number, or the numbers in a format string, could pad to."""
    if isinstance(value, bool):
        return 0
    if isinstance(value, int):
        return abs(value)
    if isinstance(value, (list, tuple)):
        return sum(abs(each) for each in value if type(each) is int)
    if isinstance(value, str) and ("%" in value or "{" in value):
        runs = re.findall(r"\d+", value)
        return sum(int(run) if len(run) < 12 else _INFINITE for run in runs)
    return 0


def _charge(units: int) -> None:
    left = _left.get()
    left[0] -= units
    if left[0] < 0:
        raise BudgetSpent


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict, range)) else 1


def _weight(value: Any, most: int | None = None) -> int:
    """Characters of a value's text, roughly; not counted further once above `most`, or the units left.

    A list that holds another one twice weighs it twice, since its text does.
    """
    total, most = 0, _left.get()[0] if most is None else most
    stack = [value]
    while stack and total <= most:
        one = stack.pop()
        total += _NODE
        if isinstance(one, (str, bytes)):
            total += len(one)
        elif isinstance(one, int):
            total += one.bit_length()
        elif isinstance(one, Mapping):
            stack += one.keys()
            stack += one.values()
        elif isinstance(one, (list, tuple, MappingView)):
            stack += list(one)  # type: ignore[arg-type]
        elif isinstance(one, Namespace):
            stack.append(one._Namespace__attrs)
    return total
