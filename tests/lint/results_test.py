#!/usr/bin/env python3
"""The results committed under bench/results have the current format, tables and pictures are generated from them, and
the script that rewrites old files works as documented, with the candidates that the library calls serial."""
import json
import pathlib
import re
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tools"))
import bench_results
import codec_predict
import codec_tables
import moe_gpus_table
import moe_predict
import moe_table
import pipelines_table
import rewrite_serial
import tables


def entry(us):
    return {"median": us, "min": us - 1, "max": us + 1, "host": us / 10, "host_burst": us / 20}


def old_result():
    """Result in the format in which only NCCL and the copy engine counted as serial."""
    ways = {"fused": entry(17.5), "one_shot": entry(21.7), "serial_nccl": entry(28.6), "two_shot": entry(25.3)}
    return {"op": "gemm_ar", "ranks": 4, "m": 1, "n": 8192, "k": 8192, "dtype": "bf16", "strategy": "overlapped",
            "config": {"serial": "serial_nccl", "overlapped": "fused", "ways_us": ways},
            "baseline": "serial_nccl", "time_us": {"gemm": 14.9, "serial": 28.6, "overlapped": 17.5},
            "spread_us": {"serial": [27.6, 29.6], "overlapped": [16.5, 18.5]},
            "ect_us": {"serial": 13.7, "overlapped": 2.6}, "efficiency": 0.8102, "efficiency_95": [0.8, 0.82],
            "host_us": 1.75, "host_burst_us": 0.875}


def check(condition, what):
    if not condition:
        sys.exit(f"results_test: {what}")


def serial_in_the_library():
    """Names of the operators' serial candidates: literals next to Strategy::serial, and constants of roundings.h."""
    names = set(re.findall(r'constexpr std::string_view \w+ = "(\w+)"|, \w+ = "(\w+)"',
                           (ROOT / "src/overlap/contract/cuda/roundings.h").read_text()))
    found = {a or b for a, b in names}
    for path in (ROOT / "src/overlap").glob("*/cuda/*.cc"):
        if path.parent.parent.name != "contract":  # encoded candidates are no baseline
            found |= set(re.findall(r'add\("(\w+)", Strategy::serial', path.read_text()))
    return found


def rewriting():
    once = rewrite_serial.rewritten(json.dumps(old_result()))
    check(rewrite_serial.rewritten(once) == once, "a second run changes what the first one wrote")
    r = json.loads(once)
    check(r["time_us"] == {"gemm": 14.9, "serial": 21.7, "nccl": 28.6, "overlapped": 17.5}, r["time_us"])
    check(r["ect_us"] == {"serial": 6.8, "overlapped": 2.6}, r["ect_us"])
    check(r["efficiency"] == 0.6176 and r["efficiency_95"] is None, "E")
    check(r["spread_us"]["serial"] == [20.7, 22.7] and r["config"]["serial"] == "one_shot", "spread, name")
    check(bench_results.chosen(r) == "fused" and abs(bench_results.hidden(r) - 0.6176) < 1e-3, "what is chosen")
    faster = old_result()
    faster["config"]["ways_us"]["fused"] = entry(22.0)
    r = json.loads(rewrite_serial.rewritten(json.dumps(faster)))
    check(r["strategy"] == "serial" and r["efficiency"] < 0, "overlapped that is slower than serial")
    check(bench_results.chosen(r) == "one_shot" and bench_results.hidden(r) == 0, "serial hides nothing")
    check(bench_results.capped_mean([1.2, 0.5]) == 0.75, "E counts as 100 % at most")


def encoded_result():
    """Result whose encoded serial form is faster than every uncompressed one."""
    times = {"unfused": entry(33.0), "serial, 1 chunk": entry(30.0), "overlapped, 2 chunks": entry(25.0),
             "serial, 1 chunk as int8": entry(20.0), "overlapped, 2 chunks as int8": entry(12.0)}
    for name, t in times.items():
        t["form"] = name.split(",")[0].replace("unfused", "serial")
        if "as int8" in name:
            t["encoded"] = True
    return {"op": "gemm_ar", "ranks": 2, "m": 64, "n": 64, "k": 64, "dtype": "f32", "strategy": "overlapped",
            "config": {"serial": "serial, 1 chunk", "overlapped": "overlapped, 2 chunks as int8", "candidates_us": times},
            "baseline": "the fastest form", "time_us": {"gemm": 10.0, "serial": 30.0, "overlapped": 12.0},
            "spread_us": {"serial": [29.0, 31.0], "overlapped": [11.0, 13.0]},
            "ect_us": {"serial": 20.0, "overlapped": 2.0}, "efficiency": 0.9, "efficiency_95": None}


def serial_is_the_fastest(r):
    """True if serial is the fastest uncompressed candidate without overlap. (Those of an uncompressed collective have no
    form.)"""
    plain = [t["median"] for t in bench_results.candidates(r).values()
             if t.get("form", "serial") == "serial" and not t.get("encoded")]
    return r["time_us"]["serial"] == min(plain)


def encoded_is_no_baseline():
    result = encoded_result()
    check(json.loads(rewrite_serial.rewritten(json.dumps(result))) == result, "an encoded candidate becomes serial")
    check(serial_is_the_fastest(result), "serial with a codec")
    result["time_us"]["serial"] = 20.0
    check(not serial_is_the_fastest(result), "an encoded candidate passes as serial")


def network_result(op, **more):
    return {"op": op, "transport": "mpi", "link": "tbf 1gbit", "ranks": 2, "dtype": "f32", "codec": None, "repeats": 25,
            "bitwise_equal_runs": True, "error": {"max_rel": 0.001, "bound": 0.01}, "hardware": "2x A Processor",
            "commit": "abc", "date": "2026-11-24T09:00:00Z"} | more


def all_reduce_result(codec=None, encoded_us=540000.0, **more):
    """Result of an all-reduce of 64 MiB."""
    r = network_result("all_reduce", m=64, n=262144, k=1024, bytes=67108864,
                       config={"serial": "plain", "overlapped": "tandem"},
                       time_us={"gemm": 0.0, "serial": 540000.0, "overlapped": encoded_us, "wire": 538000.0,
                                "limit": 538000.0})
    if codec:
        r |= {"codec": {"text": codec, "bits_per_element": 8.25}, "wire_bytes": 17301504}
        r["time_us"] |= {"wire_encoded": 139000.0, "codec": 30000.0, "transport": 10000.0, "limit": 139000.0}
    return r | more


def prefill_result():
    times = {"rows split": entry(4300.0), "one chunk": entry(4350.0), "ISO": entry(3000.0),
             "one chunk as int4": entry(2500.0), "ISO as int4": entry(2000.0)}
    for name in ("one chunk as int4", "ISO as int4"):
        times[name]["encoded"] = True
    for name, t in times.items():
        t["form"] = "overlapped" if name.startswith("ISO") else "serial"
    return network_result("prefill", m=512, n=1408, k=512, layers=4, bytes=8, wire_bytes=1,
                          codec={"text": "int4", "bits_per_element": 4.25},
                          config={"serial": "rows split", "overlapped": "ISO as int4", "candidates_us": times},
                          time_us={"gemm": 1000.0, "serial": 4300.0, "overlapped": 2000.0, "limit": 1800.0})


def moe_result(**more):
    return network_result("moe", model="mixtral-8x7b", hidden_scale=4, tokens=2048, ep=2, tp=1, imbalance=1.0,
                          bytes=100, efficiency=0.5, time_us={"gemm": 1e4, "wire": 8e3, "serial": 2e4, "overlapped": 1.5e4},
                          spread_us={"gemm": [9e3, 2e4], "serial": [1.8e4, 2e4], "overlapped": [1.4e4, 2e4]}) | more


def made(table, *results, prefix=""):
    """Rows of a table of these results, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        for i, result in enumerate(results):
            (pathlib.Path(folder) / f"{prefix}{i}.json").write_text(json.dumps(result))
        try:
            return table(folder).split("\n")
        except SystemExit as refusal:
            return [str(refusal)]


def generators():
    lines = made(codec_tables.collectives, all_reduce_result("int8", 150000.0), all_reduce_result())
    check("ms, medians of 25, slowest rank" in lines[0], lines[0])
    check(lines[4] == "| 1gbit | all_reduce | f32 | 64 MiB | none | 540.0 | 540.0 | 1.00× | "
                      "– | – | – | – | – |", lines[4])
    check(lines[5] == "| 1gbit | all_reduce | f32 | 64 MiB | `int8` | 540.0 | 150.0 | 3.60× | "
                      "3.88× | 139.0 | 30.0 | 10.0 | 93 % |", lines[5])
    lines = made(codec_tables.prefill, prefill_result())
    check(lines[4] == "| 1gbit | 512 | 4 × 512, MLP 1408 | `int4` | 4.3 | 3.0 | 2.5 | 2.0 | ISO as int4 | 2.15× | 1.50× | 0.1 % |", lines[4])
    wrong = prefill_result() | {"error": {"max_rel": 0.02, "bound": 0.01}}
    check(made(codec_tables.prefill, wrong)[0].endswith(" Not all correct."), "a wrong result passes as right")
    encoded = moe_result(codec={"text": "int8"}, wire_bytes=25, backward=True, imbalance=1.5)
    lines = made(moe_table.table, moe_result(repeats=9, date="2026-11-23T09:00:00Z"), encoded)
    check("2026-11-23–2026-11-24; ms, medians of 9–25, " in lines[0], lines[0])
    check(lines[4].startswith("| moe | ") and " | 1.00 | 10.0 | 8.0 | 20.0 | 15.0 | 50 % | " in lines[4], lines[4])
    check(lines[5].startswith("| moe, forward and backward as `int8` | "), lines[5])
    check(" | 1.50 | 10.0 | 2.0 | 20.0 | 15.0 | 50 % | " in lines[5], lines[5])
    lines = made(moe_table.table, moe_result(), moe_result(hardware="4x Another"))
    check(lines[0].endswith("of several hardware: 2x A Processor, 4x Another: expected one a folder"), lines[0])
    check(made(codec_tables.prefill)[0].endswith(": no results"), "an empty folder")
    for kind in ("collectives", "prefill"):
        check(kind in tables.KINDS, f"no kind {kind}")


def layers_over_wire_formats():
    times = {"serial": entry(500.0), "fused, 8 blocks send, 1 part": entry(400.0), "fused, 33 blocks send, 1 part": entry(410.0),
             "serial as int8": entry(450.0), "fused, 8 blocks send, 1 part as int8": entry(320.0)}
    for name, t in times.items():
        t |= {"form": "serial" if name.startswith("serial") else "overlapped"} | ({"encoded": True} if "as" in name else {})
    plain = moe_result(ranks=4, ep=4, codec=None, backward=False, config={"candidates_us": times})
    encoded = plain | {"codec": {"text": "int8"}, "wire_bytes": 51}
    lines = made(moe_gpus_table.table, plain, encoded, prefix="moe-")
    check(len(lines) == 11 and lines[4].startswith("| mixtral-8x7b | 4 × 1 | 2048 | forward | "), lines)
    check(lines[10] == "| mixtral-8x7b | 4 × 1 | 2048 | `int8` | 1.00 | 10000 | 500 | 400 | 450 | 320 | 1.25 | 51 % |",
          lines[10])
    check(len(made(moe_gpus_table.table, encoded, prefix="moe-")) == 5, "a table of nothing")


def layers_on_an_emulated_link():
    """Result with GEMMs of 100 us and a wire time of 120, or 60 with the codec."""
    def times(serial, few, many):
        return {name: entry(us) | {"form": "serial" if name == "serial" else "overlapped"}
                for name, us in (("serial", serial), ("fused, 1 blocks", few), ("fused, 3 blocks", many))}
    more = {"ranks": 4, "ep": 4, "codec": None, "backward": False, "link": "emulated 25 GB/s 5 us same-gpu",
            "time_us": {"gemm": 100.0, "wire": 120.0, "serial": 300.0, "overlapped": 150.0}}
    even = moe_result(config={"candidates_us": times(300.0, 160.0, 150.0)}, **more)
    uneven = even | {"imbalance": 4.0, "config": {"candidates_us": times(400.0, 330.0, 420.0)}}
    encoded = {name + " as int8": t | {"encoded": True} for name, t in times(200.0, 125.0, 130.0).items()}
    coded = even | {"codec": {"text": "int8"}, "wire_bytes": 50,
                    "config": {"candidates_us": even["config"]["candidates_us"] | encoded}}
    lines = made(moe_gpus_table.emulated, coded, uneven, even, prefix="moe-")
    first = "| emulated 25 GB/s 5 us | mixtral-8x7b | 2048 | "
    check("on **emulated** links, EP 4 × TP 1" in lines[0] and "same-gpu" not in lines[4], lines)
    check(lines[4] == first + "– | 1.00 | 100 | 120 | 300 | 150 | 75 % | 90 % | 0.50 | yes |", lines[4])
    check(lines[5] == first + "– | 4.00 | 100 | 120 | 400 | 330 | 23 % | 93 % | 1.05 | yes |", lines[5])
    check(lines[6] == first + "`int8` | 1.00 | 100 | 60 | 200 | 125 | 75 % | 100 % | 0.62 | yes |", lines[6])
    check("expected an emulated link" in made(moe_gpus_table.emulated, even | {"link": "nvlink"}, prefix="moe-")[0], "nvlink")
    check("emulated_moe" in tables.KINDS, "no kind emulated_moe")


def pipelines():
    r = {"op": "pipeline", "schedule": "zb-v", "pp": 4, "microbatches": 8, "virtual": 2, "hardware": "a CPU",
         "costs_us": {"forward": 4000, "backward_input": 4000, "backward_weight": 4000, "transfer": 4000},
         "date": "2026-11-26T17:00:00Z", "repeats": 5, "time_us": {"step": 210400}, "bubble": 0.087,
         "simulated_bubble": 0.0588, "exposed": 0.213, "simulated_exposed": 0.215, "steady_exposed": -0.003,
         "simulated_steady_exposed": 0}
    lines = made(pipelines_table.table, r | {"microbatches": 16}, r)
    check("F, B, W: 8, 8, 8 ms; fastest of 5 steps" in lines[0] and "**emulated** passes" in lines[0], lines[0])
    check(lines[4] == "| 4 | 8 | `zb-v` | 210.4 | 8.7 % | 5.9 % | 21.3 % | 21.5 % | -0.3 % | 0.0 % |", lines[4])
    check(lines[5].startswith("| 4 | 16 | "), lines[5])
    refused = made(pipelines_table.table, r | {"bubble": 0.12})[0]
    check(refused.endswith("zb-v, p 4, m 8: bubble 12.0 %, simulated 5.9 %"), refused)
    check("pipelines" in tables.KINDS, "no kind pipelines")


def committed():
    for file in (ROOT / "bench/results").rglob("*.json"):
        for r in bench_results.load(file):
            if not isinstance(r, dict) or not rewrite_serial.candidates(r) or r["ranks"] == 1:
                continue
            if "gemm" not in r["time_us"] or (r["time_us"]["gemm"] == 0 and not r.get("codec")):
                continue
            check(serial_is_the_fastest(r), f"{file}: serial is not the fastest uncompressed form that does not overlap")


def predicting():
    """Mixtral, 16384 tokens on four ranks. 1 - C(6, 2) / C(8, 2) = 13/28 of 4096 rows are sent to each of three ranks,
    8 KiB each, at 345 GB/s: 135.468 us and 2 for the first signal."""
    times = {"route": 50, "place": 10, "in": 1000, "out": 100, "sum": 20, "products": 1100, "layer": 1190}
    r = {"model": "mixtral-8x7b", "tokens": 4096, "commit": "abc", "time_us": times}
    wire = 3 * 4096 * 13 / 28 * 8192 / 345e3 + 2
    p = moe_predict.predicted(r)
    check(abs(moe_predict.wire_us("mixtral-8x7b", 16384) - wire) < 1e-6 and abs(wire - 137.468) < 1e-3, f"wire {wire}")
    check(p["tokens"] == 16384 and p["products"] == 1100 and abs(p["serial"] - (1130 + 2 * wire)) < 1e-6, p)
    check(abs(p["limit"] - (p["serial"] - wire - 100)) < 1e-6, "out is shorter than the wire: that much is hidden")
    check(abs(p["overlapped"] - (p["serial"] - 0.8 * (wire + 100))) < 1e-6, p)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"hardware": "a GPU", "layers": [r, {**r, "tokens": 64}]}, file)
        file.flush()
        text = moe_predict.table(file.name)
    last = text.splitlines()[-1]
    check(text.startswith("**Predicted**") and "a GPU at commit abc" in text and text.count("mixtral") == 1, text)
    check(last == f'| mixtral-8x7b | 16384 | 1100 | 275 | 1405 | 1215 | 1167 | 6026 | {6026 / p["overlapped"]:.2f} |', last)
    check(len(bench_results.load(moe_predict.PEERS)) == 12, moe_predict.PEERS)
    # On two ranks 1 - C(4, 2) / C(8, 2) = 22/28 of 4096 rows are sent to the other one, at 354 GB/s.
    wire = 4096 * 22 / 28 * 8192 / 354e3 + 2
    p = moe_predict.predicted(r, 2)
    check(p["tokens"] == 8192 and abs(p["wire"] - 2 * wire) < 1e-6, f"two ranks: {p}, wire {wire}")


def predicting_codecs():
    """INT8 of 64 MiB: on four ranks 6 messages of 2^23 elements at 345 GB/s, on two 2 of 2^24 at 354 GB/s."""
    r = {"elements": 1 << 20, "ranks": 4, "wire_bytes": 1 << 20, "time_us": {"encode": 1, "decode": 2, "sum": 8}}
    four, two = (codec_predict.predicted(r, 64 << 20, ranks=ranks) for ranks in (4, 2))
    check(abs(four["wire"] - 6 * 2**23 / 345e3) < 1e-6 and abs(two["wire"] - 2 * 2**24 / 354e3) < 1e-6, (four, two))
    check(four["codec"] == 8 * (3 + 8 + 6) and two["codec"] == 16 * (1 + 6 + 2), "the sum of two ranks is 6/8 of four's")
    gather = codec_predict.predicted(r, 64 << 20, "all_gather", 2)
    check(gather["wire"] == two["wire"] / 2 and gather["codec"] == 16 * (1 + 2), gather)


check(serial_in_the_library() == rewrite_serial.SERIAL - {"product"}, "rewrite_serial.py and the operators differ")
rewriting()
predicting()
predicting_codecs()
encoded_is_no_baseline()
generators()
layers_over_wire_formats()
layers_on_an_emulated_link()
pipelines()
committed()
sys.argv = ["rewrite_serial.py", "--check"]
check(rewrite_serial.main() == 0, "tools/rewrite_serial.py changes what is committed")
sys.argv = ["tables.py", "--check"]
check(tables.main() == 0, "tools/tables.py changes what is committed")
