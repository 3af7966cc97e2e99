#!/usr/bin/env python3
"""chakra_test.py TANDEM: execution traces that `tandem plan --chakra` writes, by a reader that shares no code with their
writer: durations add up to the planner's terms, and the ranks' operations run to their ends without a rank that waits forever."""
import collections
import json
import os
import subprocess
import sys
import tempfile

from protobuf_reader import fields, varint

TANDEM = os.path.abspath(sys.argv[1])
COMP, SEND, RECV, COLL = 4, 5, 6, 7
VALUES = {7: "int32", 9: "int64", 13: "uint64", 27: "bool", 29: "string"}
MODEL = {"vocab": 32768, "hidden": 4096, "layers": 8, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 11264,
         "max_seq": 4096, "tie_word_embeddings": False}
EXPERTS = {"experts": 8, "top_k": 2, "expert_ffn": 11264}
# Jobs whose fastest layouts differ: model, GPUs, GPUs a host, GB/s in it and between hosts, memory in GiB, batch, accuracy.
CASES = [
    ({}, 8, 8, 450, 50, 80, 32, "lossless"),
    ({}, 8, 1, 450, 2, 24, 32, "int8"),
    ({}, 8, 4, 450, .5, 20, 64, "lossless"),
    ({"layers": 16}, 16, 8, 450, 1, 14, 64, "int4"),
    ({}, 8, 8, 450, 50, 12, 32, "int6"),
    (EXPERTS, 8, 8, 450, 50, 50, 32, "lossless"),
    (EXPERTS, 16, 8, 450, 25, 30, 64, "int8"),
    (EXPERTS, 16, 2, 450, .5, 40, 64, "int8"),
    (EXPERTS | {"kv_heads": 2, "layers": 16}, 8, 8, 450, 50, 46, 32, "int8"),
    ({"layers": 16}, 8, 1, 450, 4, 80, 8, "lossless"),
    ({"layers": 4}, 96, 8, 450, 50, 80, 192, "lossless"),
    ({}, 4, 2, 450, 8, 18, 16, "lossless"),
]


def expect(condition, text):
    if not condition:
        raise AssertionError(text)


def numbers(packed):
    at, found = 0, []
    while at < len(packed):
        value, at = varint(packed, at)
        found.append(value)
    return found


def attributes(message, field):
    found = {}
    for number, value in fields(message):
        if number != field:
            continue
        (first, name), (kind, content) = fields(value)
        expect(first == 1 and kind in VALUES, f"attribute {name}: field {kind}")
        found[name.decode()] = content.decode() if VALUES[kind] == "string" else content
    return found


def read_trace(path):
    with open(path, "rb") as file:
        data = file.read()
    messages, at = [], 0
    while at < len(data):
        size, at = varint(data, at)
        expect(at + size <= len(data), f"{path}: a truncated message")
        messages.append(data[at:at + size])
        at += size
    head = dict(fields(messages[0]))
    expect(head[1] == b"0.0.4", f"{path}: version {head[1]}")
    nodes = []
    for message in messages[1:]:
        node = {"ctrl": [], "data": [], "us": 0, "attr": attributes(message, 10)}
        for number, value in fields(message):
            name = {1: "id", 2: "name", 3: "type", 4: "ctrl", 5: "data", 7: "us", 10: None}[number]
            if name:
                node[name] = numbers(value) if name in ("ctrl", "data") else value.decode() if name == "name" else value
        nodes.append(node)
    return attributes(messages[0], 2), nodes


def check_graph(nodes, what):
    """Every dependency is on an earlier node, so that there is no cycle."""
    seen = set()
    for node in nodes:
        expect(node["id"] not in seen, f"{what}: two nodes {node['id']}")
        expect(set(node["ctrl"] + node["data"]) <= seen, f"{what}: node {node['id']} needs a later one")
        seen.add(node["id"])
        keys = set(node["attr"])
        wanted = {COMP: {"is_cpu_op", "num_ops", "tensor_size"}, COLL: {"is_cpu_op", "comm_type", "comm_size", "pg_name"},
                  SEND: {"is_cpu_op", "comm_size", "comm_src", "comm_dst", "comm_tag"}}
        expect(keys == wanted[SEND if node["type"] == RECV else node["type"]], f"{what}: attributes {keys}")


def run_all(traces, groups, what):
    """Runs the nodes of all ranks, each as soon as it may: a receive after its send, a collective once all of its group are there,
    in the same order on all of them."""
    sent, waiting, done = collections.Counter(), collections.defaultdict(dict), {rank: set() for rank in traces}
    keys = [(node["attr"]["comm_src"], node["attr"]["comm_dst"], node["attr"]["comm_tag"])
            for nodes in traces.values() for node in nodes if node["type"] == SEND]
    expect(len(keys) == len(set(keys)), f"{what}: two messages between the same ranks with one tag")
    entered = {rank: collections.Counter() for rank in traces}
    pending = {rank: collections.deque(nodes) for rank, nodes in traces.items()}
    moved = True
    while moved and any(pending.values()):
        moved = False
        for rank, queue in pending.items():
            for _ in range(len(queue)):
                node = queue.popleft()
                ready = set(node["ctrl"] + node["data"]) <= done[rank]
                attr = node["attr"]
                if ready and node["type"] == SEND:
                    sent[attr["comm_src"], attr["comm_dst"], attr["comm_tag"], attr["comm_size"]] += 1
                elif ready and node["type"] == RECV:
                    key = attr["comm_src"], attr["comm_dst"], attr["comm_tag"], attr["comm_size"]
                    ready = sent[key] > 0
                    sent[key] -= ready
                elif ready and node["type"] == COLL:
                    group = attr["pg_name"]
                    expect(rank in groups[group], f"{what}: rank {rank} is not in group {group}")
                    if "at" not in node:
                        node["at"] = entered[rank][group]
                        entered[rank][group] += 1
                        kind = attr["comm_type"], attr["comm_size"], node["name"]
                        others = waiting[group, node["at"]]
                        expect(all(other == kind for other in others.values()), f"{what}: {kind} meets {others}")
                        others[rank] = kind
                    here = [member for member in groups[group] if member in traces]
                    ready = len(waiting[group, node["at"]]) == len(here)
                if ready:
                    done[rank].add(node["id"])
                    moved = True
                else:
                    queue.append(node)
    expect(not any(pending.values()), f"{what}: ranks {[rank for rank, queue in pending.items() if queue]} wait forever")
    expect(not any(sent.values()), f"{what}: messages that no rank receives")


def check_sums(traces, best, ranks, what):
    us = collections.Counter()
    for nodes in traces.values():
        for node in nodes:
            us[node["name"]] += node["us"]
    of_all = ranks / len(traces)
    mean = {name: value * of_all / 1e6 / ranks for name, value in us.items()}
    terms, stages = best["terms_s"], best["pp"] * best["virtual_stages"]
    found = {"compute": mean["layer"] + mean.get("head", 0), "optimizer": mean["optimizer"], "fixed": mean["fixed"],
             "tp": sum(v for k, v in mean.items() if k.startswith("tp ")), "ep": sum(v for k, v in mean.items() if k.startswith("ep ")),
             "dp": sum(v for k, v in mean.items() if k.startswith(("dp ", "expert_dp "))), "pp": mean.get("send", 0)}
    for term, seconds in found.items():
        # The planner's stages have neighbours on other ranks on both sides.
        cuts = stages - (2 if best["schedule"] in ("zb-v", "dualpipe-v") else 1)
        expected = terms[term] * (cuts / stages if term == "pp" else 1)
        expect(abs(seconds - expected) <= 2e-6, f"{what}: {term} of {seconds} s, the planner has {expected}")
    return {term for term, seconds in found.items() if seconds > 0}


def flops_of(model, batch, seq):
    """Of a step without recomputation: three times those of the forward pass, causal attention in 3.5."""
    width, kv = model["heads"] * model["head_dim"], model["kv_heads"] * model["head_dim"]
    ffn = 3 * model.get("expert_ffn", model["ffn"]) * model.get("top_k", 1)
    weights = model["layers"] * model["hidden"] * (2 * width + 2 * kv + ffn) + model["hidden"] * model["vocab"]
    return batch * seq * (6 * weights + 3.5 * 2 * model["layers"] * seq * width)


def check_case(folder, index, case):
    changes, gpus, host_gpus, host, network, memory, batch, accuracy = case
    what, model = f"case {index}", MODEL | changes
    job, hardware, out = (f"{folder}/{index}{end}" for end in (".toml", ".hardware.toml", ".traces"))
    with open(job, "w") as file:
        file.write("[model]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in model.items())
                   + f'[train]\nbatch = {batch}\nseq = 4096\n[data]\npaths = ["x"]\n')
    with open(hardware, "w") as file:
        file.write(f'gpu = "H100"\ngpus_per_host = {host_gpus}\nmemory_gib = {memory}\n[link]\nhost = {host}\nnetwork = {network}\n')
    done = subprocess.run([TANDEM, "plan", job, "--gpus", str(gpus), "--hardware", hardware, "--accuracy", accuracy, "--chakra", out,
                           "--json", "-"], capture_output=True, text=True, check=False)
    expect(done.returncode == 0, f"{what}: {done.stderr}")
    best = json.loads(done.stdout)["best"]
    names = sorted(os.listdir(out))
    ranks = list(range(gpus)) if gpus <= 64 else list(range(0, gpus, int(best["tp"] * best["dp"])))
    expect(names == sorted(["groups.json"] + [f"tandem.{rank}.et" for rank in ranks]), f"{what}: files {names}")
    with open(out + "/groups.json") as file:
        groups = json.load(file)
    traces = {}
    for rank in ranks:
        head, traces[rank] = read_trace(f"{out}/tandem.{rank}.et")
        expect(head["rank"] == str(rank) and head["layout"].startswith(f"tp {best['tp']:g} dp {best['dp']:g}"), f"{what}: {head}")
        check_graph(traces[rank], f"{what}, rank {rank}")
    terms = check_sums(traces, best, gpus, what)
    ops = sum(node["attr"].get("num_ops", 0) for nodes in traces.values() for node in nodes) * gpus / len(ranks)
    if best["recompute"] == "none":
        flops = flops_of(model, batch, 4096)
        expect(abs(ops / flops - 1) < 1e-6, f"{what}: {ops} FLOPs, expected {flops}")
    run_all(traces, groups, what)
    return terms | {f"zero {best['zero']}", f"recompute {best['recompute']}", best["schedule"]} | ({"formats"} if best["codec"] != "none" else set())


def main():
    covered = set()
    with tempfile.TemporaryDirectory(prefix="tandem-chakra-") as folder:
        for index, case in enumerate(CASES):
            found = check_case(folder, index, case)
            if len(sys.argv) > 2:
                print(index, sorted(found))
            covered |= found
    missing = {"recompute full", "zb-h1", "zb-v", "tp", "ep", "dp", "pp", "interleaved", "formats", "zero 1", "zero 2"} - covered
    expect(not missing, f"no case has {missing}")


main()
