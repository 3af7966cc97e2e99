"""Lines of the functions of C++, CUDA and Python sources, from the first of the signature to the last brace."""
import ast
import re

# Comments, literals and directives: their braces and semicolons are none of the code's.
SKIPPED = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"'
                     r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.S | re.M)
TEMPLATE = re.compile(r"^\s*template\s*<")
SCOPE = re.compile(r"(?:inline\s+|static\s+|typedef\s+)*(?:namespace|class|struct|union|enum|extern\s*$)\b")
BODY = re.compile(r"\)\s*(?:(?:const|noexcept(?:\(\))?|override|final|mutable|try|&&?)\s*)*(?:->[^=()]*(?:\(\))?)?$")
LAMBDA = re.compile(r"\](?:\s*\(\))?\s*(?:mutable\s*)?(?:->[^=()]*)?$")
VARIABLE = re.compile(r"(?<!operator)(?<![=!<>])=(?!=)")


def outline(head):
    """`head` without what stands in parentheses and braces, and without a template's parameters."""
    less = None
    while less != head:
        less, head = head, re.sub(r"\([^()]+\)", "()", re.sub(r"\{[^{}]*\}", "", head))
    while TEMPLATE.match(head):
        at, depth = head.index("<") + 1, 1
        while depth and at < len(head):
            depth += (head[at] == "<") - (head[at] == ">" and head[at - 1] != "-")
            at += 1
        head = head[at:]
    return head.strip()


def kind_of(head, inside, nested):
    """What a brace after `head` opens. `inside` a function; `nested` in parentheses or data."""
    head = outline(head)
    if inside:
        return "inner"
    if LAMBDA.search(head) and "operator" not in head:
        return "function"
    if nested:
        return "data"
    if SCOPE.match(head) and not BODY.search(head):
        return "scope"
    return "function" if BODY.search(head) and not VARIABLE.search(head) else "data"


def cpp_functions(text):
    """(first line, lines) of every function, of one in a class or a table, too; lambdas in one are part of it."""
    code = SKIPPED.sub(lambda skipped: re.sub(r"[^\n]", " ", skipped[0]), text)
    stack, begin, depth = [], 0, 0  # of (kind, first character, depth of parentheses)
    for match in re.finditer(r"[{}();]|\b(?:public|private|protected)\s*:", code):
        mark, inside = match[0], any(kind == "function" for kind, _, _ in stack)
        level = stack[-1][2] if stack else 0
        if mark in "()":
            depth += 1 if mark == "(" else -1
        elif mark == "{":
            head = code[begin:match.start()]
            kind = kind_of(head, inside, depth != level)
            stack.append((kind, begin + len(head) - len(head.lstrip()), depth))
            if kind in ("scope", "function"):
                begin = match.end()
        elif mark == "}" and stack:
            kind, first, _ = stack.pop()
            if kind == "function":
                yield code.count("\n", 0, first) + 1, code.count("\n", first, match.start()) + 1
            if kind in ("scope", "function"):
                begin = match.end()
        elif mark not in "{}" and not inside and (mark != ";" or depth == level):
            begin = match.end()


def python_functions(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno] + [decorator.lineno for decorator in node.decorator_list])
            yield first, node.end_lineno - first + 1


def functions(path, text):
    return python_functions(text) if path.endswith(".py") else cpp_functions(text)
