"""docs/reference/python.md: signatures of the package's type stubs and sources with the docstrings of the
built package, and the PyTorch layers from their source."""
import ast
import inspect
import re
import textwrap

HIDDEN = {"__eq__", "__hash__", "__repr__", "__enter__", "__exit__", "__del__", "__init_subclass__"}
GROUPS = [("Worlds", ["run", "init", "World", "Comm", "shard_of", "context_chunks"]),
          ("Operators", ["AgGemm", "GemmRs", "GemmAr", "AgWgrad", "MoeLayer", "MoeBatch", "ContextAttention",
                         "CrossAttention", "CrossAttentionBatch"]),
          ("Collectives", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv",
                           "AllReduce", "AllGather", "ReduceScatter", "AllToAll"]),
          ("Wire formats and types", ["Wire", "DType"]),
          ("Errors", ["Error", "InvalidArgument", "Mismatch", "Timeout", "Aborted", "Unsupported", "IoError",
                      "DeviceError"])]

MODULES = [("PyTorch: tandem.torch", "torch/__init__.py"), ("Megatron-Core: tandem.megatron", "megatron.py"),
           ("TorchTitan: tandem.titan", "titan.py"), ("vLLM: tandem.vllm_plugin", "vllm_plugin.py")]


def declared(files):
    """Top-level classes and functions of the files by name; of overloads a list."""
    found = {}
    for file in files:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                found.setdefault(node.name, []).append(node)
    return found


def signature(node, name):
    arguments = ast.unparse(node.args)
    words = [word for word in re.split(r", (?![^\[(]*[\])])", arguments) if not re.match(r"self\b", word)]
    text = f"{name}({', '.join(words)})"
    returns = ast.unparse(node.returns) if node.returns else "None"
    if returns != "None" and node.name != "__init__":
        text += f" -> {returns}"
    text = re.sub(r"'(Array|Comm|CodecLike)'", r"\1", text).replace("_core.", "")
    if len(text) <= 100:
        return text
    begin, end = text.index("(") + 1, text.rindex(")" if not returns or returns == "None" else ") ->")
    return "\n".join([text[:begin], *textwrap.wrap(text[begin:end], 96, initial_indent="    ", subsequent_indent="    "), text[end:]])


def text_of(doc):
    """A docstring as Markdown, without the signatures that nanobind puts first."""
    lines = inspect.cleandoc(doc or "").split("\n")
    while lines and (re.match(r"\w+\(.*\)( -> .*)?$", lines[0]) or not lines[0].strip()):
        lines.pop(0)
    lines = [line for line in lines if not re.match(r"Overloaded function|\d+\. ``", line)]
    text, code = "", False
    for line in lines:
        if line.startswith("    ") and not code and (not text or text.endswith("\n\n")):
            code, text = True, text + "```python\n"
        elif code and line.strip() and not line.startswith("    "):
            code, text = False, text.rstrip("\n") + "\n```\n\n"
        text += (line[4:] if code else re.sub(r"([<*])", r"\\\1", line)) + "\n"
    return (text.rstrip("\n") + ("\n```" if code else "")).strip()


def entry(name, nodes, value):
    node = nodes[0]
    if isinstance(node, ast.FunctionDef):
        return [f"### {name}", "```python\n" + "\n".join(signature(n, name) for n in nodes) + "\n```",
                text_of(value.__doc__ if value else ast.get_docstring(node))]
    parts = [f"### {name}", text_of(value.__doc__ if value else ast.get_docstring(node))]
    lines, texts = [], []
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and not item.target.id.startswith("_"):
            lines.append(f"{item.target.id}: {ast.unparse(item.annotation)}")
        if isinstance(item, ast.Assign) and len(item.targets) == 1:
            lines.append(ast.unparse(item))
        if not isinstance(item, ast.FunctionDef) or item.name in HIDDEN or (
                item.name.startswith("_") and item.name not in ("__init__", "__call__")):
            continue
        decorators = [ast.unparse(d) for d in item.decorator_list]
        member = inspect.getattr_static(value, item.name, None) if value else None
        doc = getattr(member, "__doc__", None) if value else ast.get_docstring(item)
        if "property" in decorators:
            lines.append(f"{item.name}: {ast.unparse(item.returns)}  # property")
        elif not any(d.endswith(".setter") for d in decorators):
            shown = {"__init__": name, "__call__": "call"}.get(item.name, item.name)
            lines.append(signature(item, shown))
            if item.name == "__init__" and doc and "Initialize self" in doc:
                doc = None
            text = text_of(doc)
            if text and text not in "".join(texts):
                texts.append(f"**`{shown}`** {text}")
    if lines:
        parts.append("```python\n" + "\n".join(lines) + "\n```")
    return [*parts, *texts]


def module(title, file):
    """Section of a module that needs more than the package to be imported: from its source."""
    tree = ast.parse(file.read_text())
    names = next(ast.literal_eval(n.value) for n in tree.body
                 if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__")
    nodes = declared([file])
    for imported in tree.body:
        source = file.parent / f"{(getattr(imported, 'module', '') or '').replace('.', '/')}.py"
        if isinstance(imported, ast.ImportFrom) and imported.level == 1 and source.is_file():
            found = declared([source])
            nodes.update((alias.name, found[alias.name]) for alias in imported.names if alias.name in found)
    parts = [f"## {title}", text_of(ast.get_docstring(tree))]
    for name in sorted(names):
        parts += entry(name, nodes[name], None)
    return parts


def page(folder, package):
    nodes = declared([folder / "_core.pyi", folder / "_world.py", folder / "_errors.py"])
    nodes.update(declared([folder / "_api.py"]))
    parts = ["# Python API", "`import tandem`; `call` is `operator(…)`. [The guide](../guide/python.md) has examples."]
    grouped = [name for _, names in GROUPS for name in names]
    rest = [name for name in package.__all__ if name not in grouped and name in nodes]
    for title, names in GROUPS + ([("Others", rest)] if rest else []):
        parts.append(f"## {title}")
        for name in names:
            parts += entry(name, nodes[name], getattr(package, name))
    for title, file in MODULES:
        parts += module(title, folder / file)
    return "\n\n".join(part for part in parts if part) + "\n"
