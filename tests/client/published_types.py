"""What a source says of an agent SDK's rewinds, as facts: fields of results, the words they may hold, the calls.

``published_types.json`` has those of the package that PyPI calls ``qoder-agent-sdk``. As a program
(``python -m tests.client.published_types TYPES CLIENT``) it prints those of sources.
"""

from __future__ import annotations

import ast
import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = ("RewindFilesResult", "RewindFileFailure", "RewindResult")
WORDS = ("RewindScope", "RewindStatus")
CALLS = ("rewind_files", "rewind")
OPTIONS = ("enable_file_checkpointing",)

GOLDEN = Path(__file__).with_suffix(".json")

#: Facts as JSON has them.
Facts = dict[str, Any]


def facts(*sources: str) -> Facts:
    """The facts that stand in sources, whichever they stand in. Nothing of them is run."""
    found: Facts = {"results": {}, "words": {}, "calls": {}, "options": {}}
    for node in itertools.chain.from_iterable(ast.walk(ast.parse(source)) for source in sources):
        match node:
            case ast.ClassDef(name=name) if name in RESULTS:
                found["results"][name] = _fields(node)
            case ast.ClassDef(name="QoderAgentOptions"):
                for line in node.body:
                    if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) in OPTIONS:
                        found["options"][ast.unparse(line.target)] = _option(line.annotation, line.value)
            case ast.ClassDef(name="AgentSession" | "QoderSDKClient"):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                        _add_method(found, method)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript(slice=words)) if name in WORDS:
                found["words"][name] = sorted(ast.literal_eval(words))
    return found


def _add_method(found: Facts, method: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    if method.name in CALLS:
        found["calls"][method.name] = _parameters(method)
    elif method.name == "start":
        for argument, default in zip(method.args.kwonlyargs, method.args.kw_defaults, strict=True):
            if argument.arg in OPTIONS:
                found["options"][argument.arg] = _option(argument.annotation, default)


def misfits(result: Mapping[str, Any], name: str) -> list[str]:
    """What is wrong with a result that is said to be of one of the types."""
    golden = json.loads(GOLDEN.read_text())
    fields = golden["results"][name]
    wrong = [f"{key} is missing" for key, field in fields.items() if field["required"] and key not in result]
    for key, value in result.items():
        kind = fields[key]["type"] if key in fields else "nothing"
        if kind in golden["words"]:
            fits = value in golden["words"][kind]
        elif kind == "list[str]":
            fits = type(value) is list and all(type(item) is str for item in value)
        else:
            fits = type(value).__name__.replace("NoneType", "None") in kind.split(" | ")
        if not fits:
            wrong.append(f"{key} is {value!r} and should be {kind}")
    return wrong


def _option(kind: ast.expr | None, default: ast.expr | None) -> Facts:
    return {
        "type": ast.unparse(kind) if kind is not None else "",
        "default": ast.unparse(default) if default is not None else None,
    }


def _fields(node: ast.ClassDef) -> Facts:
    fields = {}
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            kind = line.annotation
            optional = isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "NotRequired"
            if isinstance(kind, ast.Subscript) and optional:
                kind = kind.slice
            fields[line.target.id] = {"type": ast.unparse(kind), "required": not optional}
    return fields


def _parameters(method: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Facts]:
    arguments = method.args.args[1:]
    missing = [None] * (len(arguments) - len(method.args.defaults))
    return [
        {
            "name": argument.arg,
            **_option(argument.annotation, default),
        }
        for argument, default in zip(arguments, [*missing, *method.args.defaults], strict=True)
    ]


def main() -> None:
    sources = []
    for name in sys.argv[1:]:
        with open(name, encoding="utf-8") as file:
            sources.append(file.read())
    print(json.dumps(facts(*sources), indent=2, sort_keys=True))


if __name__ == "__main__":
    main()
