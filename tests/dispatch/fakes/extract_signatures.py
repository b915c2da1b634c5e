"""Write down the signatures of DeepEP's four APIs from its sources, which are read as text and never imported.

    python -m tests.dispatch.fakes.extract_signatures [--hybrid-ep path/to/deep_ep/hybrid_ep_buffer.py]

The packages are downloaded with pip. The source packages do not build without CUDA: pip fails after it has unpacked
them, which is enough. HybridEP is in no package, only in DeepEP's branch ``hybrid-ep``; without its file the record of
it stays as it is.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

RECORD = Path(__file__).with_name("signatures.json")

# Name of a parameter, its kind as ``inspect`` calls it, and the text of its default or None.
Signature = list[list[str | None]]


@dataclass(frozen=True)
class Source:
    """A class in a package: which methods the adapters call, and in which file they are."""

    requirement: str
    file: str
    name: str
    methods: tuple[str, ...]
    wheel: bool = False


_V1 = (
    "__init__",
    "capture",
    "set_num_sms",
    "get_dispatch_config",
    "get_combine_config",
    "get_dispatch_layout",
    "dispatch",
    "combine",
)
SOURCES = {
    "v1_0": Source("deep-ep==1.0.0", "deep_ep/buffer.py", "Buffer", _V1),
    "v1": Source(
        "tokenspeed-deepep==2.1.0.post20260810", "deep_ep/buffers/legacy.py", "Buffer", (*_V1, "destroy"), wheel=True
    ),
    "v2": Source(
        "tokenspeed-deepep==2.1.0.post20260810",
        "deep_ep/buffers/elastic.py",
        "ElasticBuffer",
        ("__init__", "capture", "dispatch", "combine", "destroy"),
        wheel=True,
    ),
    "v2_5": Source(
        "deepinfer-ep==2.5.0",
        "deep_ep/buffers/ep.py",
        "EPBuffer",
        ("__init__", "capture", "dispatch", "combine", "destroy"),
    ),
}
HYBRID = Source(
    "DeepEP, branch hybrid-ep",
    "deep_ep/hybrid_ep_buffer.py",
    "HybridEPBuffer",
    ("__init__", "dispatch_with_permute", "combine_with_unpermute"),
)


def download(source: Source) -> str:
    """The text of the file."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={folder}"]
        if source.wheel:
            kind = ["--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_28_x86_64"]
            subprocess.run([*pip, *kind, source.requirement], check=True)
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                return archive.read(source.file).decode()
        kind = ["--no-binary=:all:", "--no-build-isolation", "--no-clean"]
        subprocess.run([*pip, *kind, source.requirement], check=False, env={**os.environ, "TMPDIR": folder})
        (file,) = Path(folder).glob(f"pip-*/*/{source.file}")
        return file.read_text()


def signatures(text: str, source: Source) -> dict[str, Signature]:
    """The methods of a class, without ``self``."""
    (found,) = (n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == source.name)
    methods = {n.name: n for n in found.body if isinstance(n, ast.FunctionDef)}
    return {name: _signature(methods[name].args) for name in source.methods}


def _signature(arguments: ast.arguments) -> Signature:
    assert not arguments.posonlyargs
    assert arguments.vararg is arguments.kwarg is None
    required = len(arguments.args) - len(arguments.defaults)
    defaults = [None] * required + [ast.unparse(default) for default in arguments.defaults]
    pairs = zip(arguments.args, defaults, strict=True)
    found: Signature = [[a.arg, "POSITIONAL_OR_KEYWORD", d] for a, d in pairs if a.arg != "self"]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append([argument.arg, "KEYWORD_ONLY", None if default is None else ast.unparse(default)])
    return found


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hybrid-ep", type=Path, help="the file of HybridEPBuffer")
    given = parser.parse_args().hybrid_ep
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    texts = {key: download(source) for key, source in SOURCES.items()}
    if given:
        texts["hybrid"] = given.read_text()
    for key, text in texts.items():
        source = {**SOURCES, "hybrid": HYBRID}[key]
        record[key] = {"source": source.requirement, "class": source.name, "methods": signatures(text, source)}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
