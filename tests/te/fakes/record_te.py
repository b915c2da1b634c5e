"""Write down the signatures of Transformer Engine that this project calls, from released packages.

    python -m tests.te.fakes.record_te VERSION=FOLDER [VERSION=FOLDER ...]

``FOLDER`` is an unpacked wheel of ``transformer-engine-cu12`` or ``-cu13`` (or the ``src`` of one), which holds the
Python sources of ``transformer_engine.pytorch`` too. They are read as text: nothing of them is imported. Without
arguments the releases in ``VERSIONS`` are downloaded with pip, some 300 MB each.
"""

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("te_signatures.json")
VERSIONS = ("2.16.1", "2.20.2")
_PACKAGE = "transformer-engine-cu13"

# Public name -> (file, name of the class or function in it, methods of a class beside its constructor).
_DPA = "pytorch/attention/dot_product_attention/dot_product_attention.py"
RECORDED: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "Linear": ("pytorch/module/linear.py", "Linear", ("forward",)),
    "GroupedLinear": ("pytorch/module/grouped_linear.py", "GroupedLinear", ("forward", "backward_dw")),
    "LayerNorm": ("pytorch/module/layernorm.py", "LayerNorm", ()),
    "RMSNorm": ("pytorch/module/rmsnorm.py", "RMSNorm", ()),
    "DotProductAttention": (_DPA, "DotProductAttention", ("forward",)),
    "Fp8Padding": ("pytorch/module/fp8_padding.py", "Fp8Padding", ("forward",)),
    "Fp8Unpadding": ("pytorch/module/fp8_unpadding.py", "Fp8Unpadding", ("forward",)),
    "autocast": ("pytorch/quantization.py", "autocast", ()),
    "fp8_autocast": ("pytorch/quantization.py", "fp8_autocast", ()),
    "quantized_model_init": ("pytorch/quantization.py", "quantized_model_init", ()),
    "fp8_model_init": ("pytorch/quantization.py", "fp8_model_init", ()),
    "is_fp8_available": ("pytorch/quantization.py", "is_fp8_available", ()),
    "is_mxfp8_available": ("pytorch/quantization.py", "is_mxfp8_available", ()),
    "is_fp8_block_scaling_available": ("pytorch/quantization.py", "is_fp8_block_scaling_available", ()),
    "is_nvfp4_available": ("pytorch/quantization.py", "is_nvfp4_available", ()),
    "get_default_recipe": ("pytorch/quantization.py", "get_default_recipe", ()),
    "quantization.get_align_size_for_quantization": (
        "pytorch/quantization.py",
        "get_align_size_for_quantization",
        (),
    ),
    "quantization.FP8GlobalStateManager": (
        "pytorch/quantization.py",
        "FP8GlobalStateManager",
        ("is_fp8_enabled", "get_fp8_recipe", "get_fp8_group", "reset"),
    ),
}
# The bases from which layers inherit what their constructors take as **kwargs.
RECORDED["ops.LayerNorm"] = ("pytorch/ops/basic/layer_norm.py", "LayerNorm", ())
RECORDED["ops.RMSNorm"] = ("pytorch/ops/basic/rmsnorm.py", "RMSNorm", ())
RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")
_RECIPES_FILE = "common/recipe/__init__.py"

# Name of a parameter, its kind as ``inspect`` calls it, and the text of its default or None.
Signature = list[tuple[str, str, str | None]]


def download(version: str, folder: Path) -> Path:
    """Fetch a release with pip and unpack its Python sources."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    target = ["--python-version=3.11", "--platform=manylinux_2_28_x86_64", f"--dest={folder}"]
    subprocess.run([*pip, *target, f"{_PACKAGE}=={version}"], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "src", [name for name in archive.namelist() if name.endswith(".py")])
    return folder / "src"


def signatures(folder: Path) -> dict[str, Signature]:
    """What is recorded of one release; what it does not have is left out."""
    root = folder / "transformer_engine"
    found: dict[str, Signature] = {}
    for public, (file, name, methods) in RECORDED.items():
        node = _find(root / file, name)
        if isinstance(node, ast.FunctionDef):
            found[public] = _signature(node.args)
        elif isinstance(node, ast.ClassDef):
            for method in ast.walk(node):
                if isinstance(method, ast.FunctionDef) and method.name in ("__init__", *methods):
                    constructor = method.name == "__init__"
                    found[public if constructor else f"{public}.{method.name}"] = _signature(method.args)[1:]
    for name in RECIPES:
        node = _find(root / _RECIPES_FILE, name)
        if isinstance(node, ast.ClassDef):
            found[f"recipe.{name}"] = _fields(node)
    return found


def _find(file: Path, name: str) -> ast.stmt | None:
    if not file.exists():
        return None
    matches = [node for node in ast.parse(file.read_text()).body if getattr(node, "name", None) == name]
    return matches[-1] if matches else None


def _signature(arguments: ast.arguments) -> Signature:
    required = len(arguments.args) - len(arguments.defaults)
    defaults = [None] * required + [ast.unparse(default) for default in arguments.defaults]
    found = [(a.arg, "POSITIONAL_OR_KEYWORD", d) for a, d in zip(arguments.args, defaults, strict=True)]
    if arguments.vararg is not None:
        found.append((arguments.vararg.arg, "VAR_POSITIONAL", None))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((argument.arg, "KEYWORD_ONLY", None if default is None else ast.unparse(default)))
    if arguments.kwarg is not None:
        found.append((arguments.kwarg.arg, "VAR_KEYWORD", None))
    return found


def _fields(node: ast.ClassDef) -> Signature:
    """The constructor of a dataclass: its annotated fields."""
    return [
        (field.target.id, "POSITIONAL_OR_KEYWORD", None if field.value is None else ast.unparse(field.value))
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]


def main(arguments: list[str]) -> None:
    """Write the record of some releases."""
    record = {}
    with tempfile.TemporaryDirectory() as scratch:
        for argument in arguments or VERSIONS:
            version, _, folder = argument.partition("=")
            source = Path(folder) if folder else download(version, Path(scratch) / version)
            record[version] = {"source": f"{_PACKAGE} {version}, wheel", "signatures": signatures(source)}
    RECORD.write_text(_text(record))


def _text(record: dict[str, dict[str, Any]]) -> str:
    """JSON with a line a parameter, so that a difference between releases is a line."""
    entries = []
    for version, entry in record.items():
        lists = []
        for name, parameters in entry["signatures"].items():
            lines = ",\n".join(f"        {json.dumps(parameter)}" for parameter in parameters)
            lists.append(f"      {json.dumps(name)}: " + (f"[\n{lines}\n      ]" if lines else "[]"))
        body = ",\n".join(lists)
        source = json.dumps(entry["source"])
        entries.append(f'  "{version}": {{\n    "source": {source},\n    "signatures": {{\n{body}\n    }}\n  }}')
    return "{\n" + ",\n".join(entries) + "\n}\n"


if __name__ == "__main__":
    main(sys.argv[1:])
