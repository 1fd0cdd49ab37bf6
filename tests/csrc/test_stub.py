"""_bridge.pyi says what the compiled module holds: names, properties and methods, both ways."""

import ast
from pathlib import Path

import pyggtrain.errors
from pyggtrain import _bridge

STUB = Path(pyggtrain.errors.__file__).with_name("_bridge.pyi")


def test_stub_and_module_hold_the_same_names() -> None:
    tree = ast.parse(STUB.read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = {
        node.name: {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    constants = {
        node.target.id
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id.isupper()
    }
    public = {name for name in vars(_bridge) if not name.startswith("_")}
    assert public == functions | set(classes) | constants
    for name, members in classes.items():
        found = {
            member
            for member in vars(getattr(_bridge, name))
            if not member.startswith("_") or member.startswith("__dlpack")
        }
        assert found == {member for member in members if member != "__init__"}, name
