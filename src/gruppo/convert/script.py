"""Script: the calls of a peer's training script in Python, which is parsed and never run."""

import ast
import operator
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gruppo.errors import InputError

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}  # fmt: skip


class Unknown(Exception):
    """A value that only running the script would give."""


class Script:
    """The calls of a script with the values of their arguments, as far as they are constants."""

    def __init__(self, text: str) -> None:
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise InputError(f"the script is not Python: {error}") from error
        self.constants: dict[str, Any] = {}
        self.calls: list[tuple[str, list[Any], dict[str, Any]]] = []
        """Last name of the function, and the arguments that are known."""
        self.computed: list[tuple[str, str]] = []
        """Last name of the function and name of a keyword whose value only running the script would give."""
        for node in sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0)):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._keep(self.constants, node.targets[0].id, node.value)
        for node in sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0)):
            if isinstance(node, ast.Call):
                named: dict[str, Any] = {}
                for keyword in node.keywords:
                    if keyword.arg:
                        self._keep(named, keyword.arg, keyword.value)
                    if keyword.arg not in named:
                        self.computed.append((_last(node.func), keyword.arg or "**"))
                self.calls.append((_last(node.func), [self._or_none(a) for a in node.args], named))

    def _keep(self, values: dict[str, Any], name: str, node: ast.expr) -> None:
        with suppress(Unknown):
            values[name] = self.value(node)

    def _or_none(self, node: ast.expr) -> Any:
        try:
            return self.value(node)
        except Unknown:
            return None

    def value(self, node: ast.expr) -> Any:
        """The value of an expression of constants; environment variables have their defaults."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in self.constants:
            return self.constants[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](self.value(node.left), self.value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.value(node.operand)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):  # an option of the command line, or this
            return self.value(node.values[-1])
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            return dict(zip(keys, (self.value(item) for item in node.values), strict=True))
        if isinstance(node, ast.Call) and node.args:
            kind = {"int": int, "float": float, "str": str}.get(_last(node.func))
            if kind is not None:
                return kind(self.value(node.args[0]))
            if _last(node.func) in ("get", "getenv") and len(node.args) == 2:
                return self.value(node.args[1])
        raise Unknown

    def find(self, *names: str) -> tuple[str, list[Any], dict[str, Any]] | None:
        """The last call of any of these."""
        return next((call for call in reversed(self.calls) if call[0] in names), None)

    def keywords(self, *names: str) -> dict[str, Any]:
        """Keywords of all calls of these, later ones over earlier ones."""
        return {key: value for name, _, named in self.calls if name in names for key, value in named.items()}


def _last(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
