#!/usr/bin/env python3
"""generate_test.py TANDEM MODEL: texts of `generate`, `generate --prompts` and `serve` on GPU ranks in f32 against those
of a CPU rank. Exit code 77 without a GPU."""
import json
import os
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../engine/serve"))
from serve_test import MODEL, TANDEM, Server, expect, generate, random_requests, test_texts_are_those_of_generate  # noqa: E402


def count_gpus():
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return 0
    return listed.stdout.count("\n") if listed.returncode == 0 else 0


def layouts(gpus):
    yield ("--device", "gpu")
    yield ("--device", "gpu", "--tp", "2", "--ranks-per-gpu", "2")
    if gpus > 1:
        yield ("--device", "gpu", "--tp", "2")


def expect_same(found, wanted, what):
    """Sums in another order seldom choose another token."""
    others = [(one, other) for one, other in zip(found, wanted, strict=True)
              if (one["token_ids"], one["text"], one["ended_by"]) != (other["token_ids"], other["text"], other["ended_by"])]
    expect(len(others) <= 1, (what, others))
    for one, other in zip(found, wanted):
        if one["token_ids"] == other["token_ids"]:
            worst = max(map(lambda a, b: abs(a - b), one["log_probs"], other["log_probs"]))
            expect(worst < 1e-3, (what, worst, one))


ON_CPU = ("--device", "cpu", "--dtype", "f32")


def one_text(path, *options):
    subprocess.run([TANDEM, "generate", MODEL, "--prompt", "int main() {", "--max-tokens", "40", "--seed", "3",
                    "--dtype", "f32", "--json", path, *options], capture_output=True, check=True)
    with open(path) as file:
        return json.load(file)


def main():
    gpus = count_gpus()
    if gpus == 0:
        print("skipped: no GPU")
        return 77
    folder = tempfile.mkdtemp(prefix="tandem-generate-")
    os.environ["TANDEM_CACHE_DIR"] = folder + "/cache"
    try:
        requests = random_requests(24)
        wanted = generate(folder, MODEL, requests, *ON_CPU, "--batch", "1")
        single = one_text(folder + "/cpu.json", "--device", "cpu")
        for layout in layouts(gpus):
            for batch in ("1", "5", "24"):
                found = generate(folder, MODEL, requests, "--dtype", "f32", "--batch", batch, *layout)
                expect_same(found, wanted, f"{layout}, batch {batch}")
            expect(len(generate(folder, MODEL, requests, *layout)) == len(requests), f"{layout} in bf16")
            found = one_text(folder + "/gpu.json", *layout)
            expect(found["token_ids"] == single["token_ids"], (layout, found, single))
            server = Server(MODEL, "--dtype", "f32", "--batch", "6", *layout)
            test_texts_are_those_of_generate(folder, server, *ON_CPU, "--batch", "1")
            server.stop()
            print(f"{' '.join(layout)}: the texts of a CPU rank", flush=True)
    finally:
        for process in Server.started:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


sys.exit(main())
