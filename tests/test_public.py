"""Guards: the public names, and what an import may load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import deltatree

SOURCE = Path(deltatree.__file__).parent
HEAVY = ("torch", "transformers", "matplotlib", "fastapi")


def test_public_names_are_exactly_all():
    assert set(dir(deltatree)) == set(deltatree.__all__)
    for name in deltatree.__all__:
        assert getattr(deltatree, name) is not None
    with pytest.raises(AttributeError):
        deltatree.nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("deltatree", HEAVY),
        ("deltatree.cli", HEAVY),
        ("deltatree.decode.options", HEAVY),
        ("deltatree.tree", HEAVY[1:]),
    ],
)
def test_an_import_loads_no_more_than_it_needs(module, forbidden):
    code = f"import {module}, sys; print([m for m in {forbidden!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_imports_point_one_way():
    """`tree` imports none of the other rooms; `decode` knows no model and no kernel; nothing inside knows the outside."""
    inside = {"tree", "kernels", "state", "verify", "models", "drafter", "decode", "transitions"}
    may = {
        "tree": {"tree", "errors"},
        "kernels": {"kernels", "tree", "transitions", "errors"},
        "state": {"state", "kernels", "tree", "errors"},
        "verify": {"verify", "state", "kernels", "errors"},
        "transitions": {"transitions", "tree", "errors", "files", "lazy"},
    }
    for room in inside:
        for file in (SOURCE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("deltatree."):
                    other = node.module.split(".")[1]
                    assert other not in {"cli", "serve", "bench", "chart", "pair_api"}, file
                    assert other in may.get(room, {other}), (file, node.module)
                    if room == "decode":
                        assert not node.module.startswith(("deltatree.kernels", "deltatree.models.reference")), file


def test_B58_no_attention_package_is_needed():
    """Neither flash-attention nor flash-linear-attention is imported with a module, so a chip without them misses nothing.

    One function may take the second, if it is there."""
    for file in SOURCE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        inside = {node for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for node in ast.walk(f)}
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            packages = {name.split(".")[0] for name in names} & {"flash_attn", "fla", "xformers"}
            optional = packages == {"fla"} and node in inside and file == SOURCE / "verify" / "chain.py"
            assert not packages or optional, file
    code = (
        "import sys; sys.modules['flash_attn'] = sys.modules['fla'] = None; import deltatree; "
        "deltatree.load(device='cpu').generate('Hello', max_new_tokens=4)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
