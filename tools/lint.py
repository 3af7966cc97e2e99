#!/usr/bin/env python3
"""lint.py < FILES: rules that no compiler checks, for the files (relative paths) named on standard
input. Prints one line per finding and exits 1 if there is one."""
import re
import sys

from function_lengths import functions

MAX_LINES = 500
MAX_FUNCTION = 80
# Files of src/, include/ and python/ with a longer function, and how long that may be: at most six, of kernels.
LONG_FUNCTIONS = {"src/gemm/cuda/rows_gemm.cu": 94, "src/kernels/cuda/paged_chunks.cuh": 170,
                  "src/kernels/cuda/paged_floats.cuh": 139, "src/kernels/cuda/paged_tiles.cuh": 153,
                  "src/kernels/cuda/router.cu": 87, "src/overlap/gemm_ar/cuda/fused_kernel.cuh": 102}
# Lines of src that take the whole job: a function takes the sections that it reads.
MAX_WHOLE_JOBS = 40
MAX_OPENING = 12  # lines of the comment that a public header begins with
CODE = (".h", ".cc", ".cu", ".cuh")
LOADED = '#include "core/cuda/load_module.cuh"'
TEXT = CODE + (".py", ".sh", ".cmake", ".toml", ".js", ".css", ".html", ".md", ".txt", ".json")

# Layers of src/, bottom up: each may include its own files and those of all levels before its own,
# not of another layer of its level.
LEVELS = [["core"], ["observe", "schedule"], ["comm"], ["codec"], ["gemm"], ["kernels"], ["collectives"], ["tune"],
          ["overlap/contract"], ["overlap/gather", "overlap/scatter", "overlap/collectives"], ["overlap/operators"], ["overlap/moe"],
          ["overlap/registry"], ["fit"], ["engine/report"], ["engine/model"], ["engine/tokenizer"], ["engine/chat"], ["engine/config"], ["engine/optim", "engine/data"],
          ["engine/parallel"], ["engine/checkpoint", "engine/eval"], ["engine/plan"], ["engine/train", "engine/infer"], ["engine/check", "engine/serve"], ["engine/launch"],
          ["bench"], ["cli"]]
BELOW = {}
for level in LEVELS:
    below = list(BELOW)
    for layer in level:
        BELOW[layer] = below
BELOW["fit"] = ["core", "observe", "schedule", "comm", "codec", "collectives"]  # no models
BELOW["engine/report"] = ["core", "observe"]  # reads records, not the engine
# Layer that implements a public header; core implements the others.
PUBLIC = {"communicator": "comm", "world": "comm", "cuda": "comm", "codec": "codec", "quantize": "codec",
          "collectives": "collectives", "strategy": "tune", "overlap": "overlap/contract", "moe": "overlap/moe",
          "attention": "overlap/contract", "cross_attention": "overlap/contract", "tandem": "cli"}

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')
MACHINE_PATH = re.compile(r"(?<![\w.$}-])/(?:work|home|root|Users|mnt)/")
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")
OLD_CODE = re.compile(
    r"^\s*(?://+\s*(?:#\s*include\b|(?:if|for|while|return|const|auto|int|void|std::)\b.*[;{]\s*$"
    r"|[\w.\->:\[\]]+\s*(?:=|\+=|\()[^.]*\);\s*$|[{}]+\s*$))")
# A comment begins with a noun or a verb.
OPENER = re.compile(r"\s*(?:(?:Of|What|Who|Whose|Whom|Where|Which|How|The same|[Tt]hat of|[Tt]hose (?:in|of|that|to))\b"
                    r"|[Tt]he same[,;.]|[Aa]s [\w:/.]+'s?(?!\w)|As \w+::)")
# Words that the code once used for what this field has names for: no part of an identifier, nor a JSON
# name. The value is what to write.
WORDS = {
    "way": "candidate, algorithm", "ways": "candidates, algorithms", "courier": "copy_warp", "couriers": "copy_warps",
    "hub": "server", "applicant": "pending_peer", "waker": "event_fd", "ruling": "decision", "dinner": "d_act",
    "normed": "x_norm", "outbox": "send_buffer", "placing": "permutation", "announce": "notify", "remark": "note",
    "beside": "concurrent, overlapped", "most": "max", "least": "min", "theirs": "remote", "mine": "local",
    "job": "params, args", "jobs": "params, args", "adding": "fused", "landed": "arrived", "told": "signalled",
    "bell": "futex_waiter", "lent": "zero_copy", "applicants": "pending_peers", "own": "local",
    "part": "shard, partial, slice", "parts": "shards, partials, slices", "piece": "chunk, slice",
    "pieces": "chunks, slices", "place": "position, coordinates", "places": "positions, coordinates",
    "plain": "uncompressed, collective, serial_kernels", "kept": "saved", "held": "owned, local",
    "gates": "arrivals", "works": "work_items", "entered": "ready", "packs": "vecs",
}
PHRASES = {"or_plain": "allow_uncompressed", "OrPlain": "AllowUncompressed", "refused_choices": "dropped_routings",
           "HeldWorld": "WorldState", "KeepsCommunicator": "CommunicatorOwner", "tied_head": "tie_word_embeddings",
           "moe_every": "moe_layer_freq", "bucket_mb": "dp_bucket_mib"}
# Plain English inside a name.
ENGLISH = re.compile(r"at_(?:most|least)|At(?:Most|Least)|in_place|[Hh]eld_?[Oo]ut|SLURM_JOB_ID")
SUBWORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
STRING = re.compile(r'"(?:\\.|[^"\\])*"')
# Readers of files that earlier versions wrote, and names of tests, which are sentences.
ALIASES = ("tests/engine/config/train_config_test.cc", "src/tune/op_desc.cc",
           "tests/seams/seams_test.cc")
TEST_NAME = re.compile(r"\bT(?:YPED_T)?EST(?:_[FP])?\((\w+), \w+\)")
# Copies on the default stream, which does not synchronize with any of our streams.
UNORDERED_COPY = re.compile(r"\bcudaMem(?:cpy|set)(?:2D|3D)?\(")
FLOATS = re.compile(r"\bspan<(?:const )?float>")
# Calls that ask for the kind of device in src/engine: messages to the host, peer access, cuDNN.
MAX_DEVICE_CALLS = 8
STREAM = re.compile(r"std::[io]?stringstream\b")
EXIT = re.compile(r"(?<![\w:.>])(?:std::)?(?:_?exit|quick_exit|abort)\s*\(\s*(?:\d|EXIT_|status|code|\))")


def public_layer(path):
    return PUBLIC.get(path.split("tandem/")[-1].removesuffix(".h"), "core")


def layer_of(parts):
    if parts[0] == "overlap":
        if len(parts) == 2:
            return "overlap/registry"
        layer = "/".join(parts[:2])
        return layer if layer in BELOW else "overlap/operators"
    if parts[0] == "engine" and (parts[1] != "model" and parts[-1].startswith("config.") or parts[1:] == ["model", "config_keys.cc"]):
        return "engine/config"  # the room's section of a job
    return "/".join(parts[:2]) if parts[0] == "engine" else parts[0]


def layer_rules(path, quoted, system):
    """Reason why the layer of `path` may not have this include, or None."""
    if path.startswith("include/tandem/"):
        if quoted and not quoted.startswith("tandem/"):
            return f'public header includes "{quoted}": only "tandem/..." and the standard library'
        layer = public_layer(path)
        target = quoted and public_layer(quoted)
        if quoted and layer != "cli" and target not in [layer, *BELOW[layer]]:
            return f'public header of {layer} includes "{quoted}" of {target}'
        if system and ("/" in system or system.endswith(".h")):
            return f"public header includes <{system}>: only \"tandem/...\" and the standard library"
        return None
    parts = path.split("/")
    if parts[0] != "src" or not quoted:
        return None
    layer, target = layer_of(parts[1:]), layer_of(quoted.split("/"))
    if target == "tandem":
        target = public_layer(quoted)
    if layer not in BELOW:
        return f"src/{layer} is not a layer: expected one of {', '.join(BELOW)}"
    folder = quoted.split("/")[:2]
    if layer == target == "overlap/operators" and folder != parts[1:3]:
        return f'{"/".join(parts[1:3])} includes "{quoted}" of {"/".join(folder)}: an operator may not use another'
    if target in [layer, *BELOW[layer]]:
        return None
    return f'layer {layer} includes "{quoted}" of {target}: may use {", ".join(BELOW[layer])}'


def word_rules(line, opens):
    """What the words of a line of C++ are to be instead. `opens`: a comment in it is not the next line of another."""
    code, _, comment = STRING.sub(lambda text: text[0].replace("//", ""), TEST_NAME.sub(r"\1", line)).partition("//")
    comment = comment.lstrip("/<! ")
    if opens and OPENER.match(comment):
        yield f"comment begins with '{comment.split()[0]}': begin with a noun or a verb"
    names = [text[1:-1] for text in STRING.findall(code) if IDENTIFIER.fullmatch(text[1:-1])]
    names = [name for name in names if "_" in name or WORDS.get(name, "").count("_")]  # not a word of English
    for name in names + IDENTIFIER.findall(STRING.sub("", code)):
        if name in PHRASES:
            yield f"{name}: write {PHRASES[name]}"
        for part in SUBWORD.findall(ENGLISH.sub("", name)):
            if part.lower() in WORDS:
                yield f"{name}: write {WORDS[part.lower()]} for '{part.lower()}'"


def count_rules(paths):
    """Findings about lines that all of src may have a limited number of."""
    jobs, calls = 0, 0
    for path in paths:
        if path.startswith("src/") and path.endswith(CODE):
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
            jobs += len(re.findall(r"const TrainConfig ?&", text))
            calls += text.count("on_gpu()") if path.startswith("src/engine/") else 0
    if jobs > MAX_WHOLE_JOBS:
        yield f"src: {jobs} times const TrainConfig&: at most {MAX_WHOLE_JOBS}: take the sections that are read"
    if calls > MAX_DEVICE_CALLS:
        yield f"src/engine: {calls} times on_gpu(): at most {MAX_DEVICE_CALLS}"


def check(path):
    try:
        with open(path, encoding="utf-8", newline="") as file:
            lines = file.read().split("\n")
    except UnicodeDecodeError:
        return [(1, "is not UTF-8")]
    found = []
    code = path.endswith(CODE)
    is_lint = path in ("tools/lint.py",)
    if lines and lines[-1] != "":
        found.append((len(lines), "no newline at the end"))
    if len(lines) - 1 > MAX_LINES and not path.endswith((".json", ".md", ".txt")):
        found.append((MAX_LINES + 1, f"{len(lines) - 1} lines: at most {MAX_LINES}"))
    if path.endswith((".h", ".cuh")) and "#pragma once" not in lines:
        found.append((1, "header without #pragma once"))
    if re.fullmatch(r"src/(overlap|engine)/(?!registry[.]|no_cuda[.]cc)[^/]*", path):
        found.append((1, "loose file: put it in a folder of " + path.rsplit("/", 1)[0]))
    if path.startswith("src/") and path.endswith(".cu") and LOADED not in lines:
        found.append((1, "kernels that nothing loads before their first launch: " + LOADED))
    opening = next((i for i, line in enumerate(lines) if not line.startswith("//")), 0)
    if path.startswith("include/tandem/") and opening > MAX_OPENING:
        found.append((MAX_OPENING + 1, f"opens with {opening} lines: at most {MAX_OPENING}; details belong in docs/reference"))
    if path.endswith((*CODE, ".py")) and path.startswith(("src/", "include/", "python/")):
        limit = LONG_FUNCTIONS.get(path, MAX_FUNCTION)
        found += [(number, f"function of {length} lines: at most {limit}")
                  for number, length in functions(path, "\n".join(lines)) if length > limit]
    raw = None  # the end of the raw string that the line is in
    for number, line in enumerate(lines, 1):
        begins = raw is None and re.search(r'R"(\w*)\(', line)
        if begins and f'){begins[1]}"' not in line[begins.end():]:
            raw = f'){begins[1]}"'
        elif raw and raw in line:
            raw = None
        elif code and not raw and path not in ALIASES:
            previous = lines[number - 2].lstrip() if number > 1 else ""
            opens = not (line.lstrip().startswith("//") and previous.startswith("//"))
            found += [(number, reason) for reason in word_rules(line, opens)]
        if line.endswith("\r") or line.rstrip() != line:
            found.append((number, "white space at the end of the line"))
        if is_lint:
            continue
        if MACHINE_PATH.search(line):
            found.append((number, "path of one machine"))
        if UNFINISHED.search(line):
            found.append((number, "unfinished: do it or leave it out"))
        if not code:
            continue
        match = INCLUDE.match(line)
        reason = match and layer_rules(path, match[1], match[2])
        if reason:
            found.append((number, reason))
        if OLD_CODE.match(line):
            found.append((number, "code in a comment"))
        near = "\n".join(lines[max(number - 4, 0):number + 3])
        if UNORDERED_COPY.search(line) and "ynchronize(" not in near:
            found.append((number, "copy that no stream orders: ...Async on the stream that has its writers"
                                  " and readers, or synchronize beside it"))
        if path.startswith("src/") and STREAM.search(line) and "exceptions(" not in near:
            found.append((number, "text stream, which takes a failed allocation for its end: Lines, words_of"
                                  " or printed (core/system/lines.h)"))
        if path.startswith("src/"):
            if re.match(r"\s*default\s*:", line):
                found.append((number, "default: in a switch hides a missing case"))
            if not path.startswith(("src/cli/", "src/engine/launch/")) and EXIT.search(line.split("//")[0]):
                found.append((number, "library code ends the process: throw instead"))
            if path.startswith("src/engine/") and FLOATS.search(line):
                found.append((number, "span of floats: pass a Tensor (core/host_copy.h has views)"))
        if path.startswith(("src/", "bench/")) and not path.startswith("src/gemm/") and "set_kernel_threads(" in line:
            found.append((number, "set_kernel_threads: hold KernelThreads (gemm/gemm.h)"))
    return found


def main():
    count = 0
    paths = sorted({line.strip() for line in sys.stdin if line.strip()})
    for finding in count_rules(paths):
        print(finding)
        count += 1
    for path in paths:
        if not (path.endswith(TEXT) or path.split("/")[-1] in ("Makefile", "run")):
            continue
        for number, message in check(path):
            print(f"{path}:{number}: {message}")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
