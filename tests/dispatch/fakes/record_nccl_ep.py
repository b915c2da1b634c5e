"""Write down the signatures of NCCL EP as Transformer Engine has it, from the released packages.

    python -m tests.dispatch.fakes.record_nccl_ep [VERSION ...]

The wheels, some 300 MB each, are downloaded with pip and read as text: nothing of them is imported.
"""

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

RECORD = Path(__file__).with_name("nccl_ep_signatures.json")
VERSIONS = ("2.17.1", "2.18.0", "2.19.0", "2.20.2")
FUNCTIONS = ("ep_bootstrap", "is_ep_bootstrapped", "ep_finalize", "ep_dispatch", "ep_combine")
_PACKAGE, _FILE = "transformer-engine-cu13", "transformer_engine/pytorch/ep.py"

# Name of a parameter, its kind as ``inspect`` calls it, and the text of its default or None.
Signature = list[tuple[str, str, str | None]]


def download(version: str) -> str:
    """The source of the module in a release."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        target = ["--python-version=3.11", "--platform=manylinux_2_28_x86_64", f"--dest={folder}"]
        subprocess.run([*pip, *target, f"{_PACKAGE}=={version}"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(_FILE).decode()


def signatures(source: str) -> dict[str, Signature]:
    """The public functions and the constructor of the buffer."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
            found[node.name] = _signature(node.args)
        elif isinstance(node, ast.ClassDef) and node.name == "EpBuffer":
            (init,) = (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
            found["EpBuffer"] = _signature(init.args)[1:]
    return found


def _signature(arguments: ast.arguments) -> Signature:
    assert not arguments.posonlyargs
    assert arguments.vararg is arguments.kwarg is None
    required = len(arguments.args) - len(arguments.defaults)
    defaults = [None] * required + [ast.unparse(default) for default in arguments.defaults]
    found = [(a.arg, "POSITIONAL_OR_KEYWORD", d) for a, d in zip(arguments.args, defaults, strict=True)]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((argument.arg, "KEYWORD_ONLY", None if default is None else ast.unparse(default)))
    return found


def main(versions: list[str]) -> None:
    """Write the record of some releases."""
    record = {version: signatures(download(version)) for version in versions}
    lines = []
    for version, functions in record.items():
        body = ",\n".join(
            f'    "{name}": [' + "".join(f"\n      {json.dumps(p)}," for p in parameters).rstrip(",") + "\n    ]"
            if parameters
            else f'    "{name}": []'
            for name, parameters in functions.items()
        )
        lines.append(f'  "{version}": {{\n{body}\n  }}')
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:] or list(VERSIONS))
