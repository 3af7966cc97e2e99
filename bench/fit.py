#!/usr/bin/env python3
"""fit.py TANDEM OUT [CASE...]: runs of `tandem fit` on Debian's packages (tools/package_data.py), a JSON file for each
case in OUT: the chosen parameters of each method at seeds 0 to 4, with the grid that they were chosen on. Cases:
convex (n 16, kappa 100), shuffled (the same, clients alike), steep (kappa 300), gossip, sparse (proxcsl, L1), kappa (rounds
against kappa), many (n 128), walk (api-bcd), uneven (its tokens on 4 ranks, in seconds), link (emulated). A case whose
file has this commit is not run again."""
import datetime
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile

from processors import cpu

HERE = os.path.dirname(os.path.abspath(__file__))
SEEDS = range(5)
POINTS = 12  # of a saved history
ONE_PERCENT = .01  # distance


def data(folder, rows, words):
    return make(f"{folder}/packages-{rows}x{words}.svm", "--rows", str(rows), "--words", str(words))


def make(path, *options):
    if not os.path.exists(path):
        subprocess.run([sys.executable, HERE + "/../tools/package_data.py", *options, path], check=True, stdout=subprocess.DEVNULL)
    return path


def fit(tandem, path, method, **options):
    """Result of one run, with its command. Flags have the value True."""
    words = ["--method", method]
    for name, value in options.items():
        words += ["--" + name.replace("_", "-")] + ([] if value is True else [str(value)])
    done = subprocess.run([tandem, "fit", path, *words, "--json", "-"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):
        sys.exit(f"tandem fit {' '.join(words)}: {done.stderr}")
    run = json.loads(done.stdout)
    run = run[-1] if isinstance(run, list) else run  # the control
    reached = [point for point in run["history"] if point["distance"] is not None and point["distance"] <= ONE_PERCENT]
    run["to_one_percent"] = {key: reached[0][key] for key in ("rounds", "bytes_sent", "seconds")} if reached else None
    step = max(1, math.ceil(len(run["history"]) / POINTS))
    run["history"] = run["history"][:-1:step] + run["history"][-1:]
    run["command"] = " ".join(["tandem fit", os.path.basename(path), *words])
    print(f"{run['command']}: {run['rounds']} rounds, {run['floats_up']} floats up, {run['bytes_sent']} bytes, distance {run['distance']}", flush=True)
    return run


def tuned(tandem, path, method, grid, cost="floats_up", **options):
    """Runs at the grid's best point, chosen by seed 0; a point that misses the tolerance costs most."""
    points = [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
    tried = [(fit(tandem, path, method, seed=0, **options, **point), point) for point in points]
    best, point = min(tried, key=lambda each: (not each[0]["reached_tol"], each[0][cost]))
    runs = [best] + [fit(tandem, path, method, seed=seed, **options, **point) for seed in SEEDS if seed]
    return {"method": method, "point": point, "grid": [{**p, cost: r[cost], "reached_tol": r["reached_tol"]} for r, p in tried], "runs": runs}


def tune_local_steps(tandem, path, gd, scaffnew, compressed, **common):
    """gd, with twelve steps, and methods of local steps, with twelve points each."""
    return [tuned(tandem, path, "gd", {"step": gd}, **common), tuned(tandem, path, "scaffnew", scaffnew, **common),
            tuned(tandem, path, "compressed-scaffnew", compressed, **common)]


STEPS = [1, 1.1, 1.2, 1.3, 1.35, 1.4, 1.45, 1.5, 1.55, 1.6, 1.7, 2]


def convex(tandem, folder):
    path = data(folder, 12800, 1000)
    common = dict(l2="auto:kappa=100", clients=16, tol=1e-10, max_rounds=4000)
    return [*tune_local_steps(tandem, path, STEPS, {"p": [.08, .1, .13, .16], "step": [.7, 1, 1.2]},
                              {"sparsity": [4, 5], "p": [.4, .5, .6], "step": [1.2, 1.4]}, **{**common, "max_rounds": 1000}),
            tuned(tandem, path, "tamuna", {"sparsity": [2], "p": [.4, .5, .6, .7], "step": [.7, 1, 1.2]}, cohort=2, **common),
            {"method": "scaffnew --control", "runs": [fit(tandem, path, "scaffnew", control=True, **common)]},
            {"method": "tamuna --control", "runs": [fit(tandem, path, "tamuna", control=True, cohort=4, **common)]}]


def shuffled(tandem, folder):
    return tune_local_steps(tandem, data(folder, 12800, 1000), STEPS, {"p": [.1, .12, .14, .16], "step": [.7, 1, 1.2]},
                            {"sparsity": [4, 5], "p": [.3, .4, .5], "step": [1, 1.2]}, l2="auto:kappa=100", clients=16, shuffle=True, tol=1e-10,
                            max_rounds=1000)


def steep(tandem, folder):
    return tune_local_steps(tandem, data(folder, 12800, 1000), STEPS, {"p": [.05, .07, .09, .12], "step": [.85, 1, 1.2]},
                            {"sparsity": [4, 5], "p": [.2, .25, .3], "step": [1.2, 1.4]}, l2="auto:kappa=300", clients=16, tol=1e-10,
                            max_rounds=2000)


def many(tandem, folder):
    path = data(folder, 12800, 500)
    common = dict(l2="auto:kappa=100", clients=128, tol=1e-6, max_rounds=1000)
    return [*tune_local_steps(tandem, path, [.7, .8, .9, 1, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4],
                              {"p": [.12, .15, .2, .25], "step": [.85, 1, 1.2]}, {"sparsity": [12, 16], "p": [.4, .5, .6], "step": [1.2, 1.5]}, **common),
            tuned(tandem, path, "tamuna", {"sparsity": [4, 8], "p": [.5, .7]}, cohort=16, **{**common, "max_rounds": 4000})]


def kappa(tandem, folder):
    path = data(folder, 3200, 500)
    values = [30, 100, 300, 1000, 3000]
    methods = []
    for method in ("gd", "scaffnew"):
        runs = [fit(tandem, path, method, l2=f"auto:kappa={k}", clients=16, tol=1e-8, max_rounds=100000) for k in values]
        xs, ys = [math.log(k) for k in values], [math.log(run["rounds"]) for run in runs]
        x, y = sum(xs) / len(xs), sum(ys) / len(ys)
        slope = sum((a - x) * (b - y) for a, b in zip(xs, ys)) / sum((a - x) ** 2 for a in xs)
        print(f"{method}: rounds grow as kappa^{slope:.3f}", flush=True)
        methods.append({"method": method, "exponent": slope, "runs": runs})
    return methods


def gossip(tandem, folder):
    path = data(folder, 3200, 512)
    common = dict(l2="auto:kappa=30", clients=16, tol=1e-10, max_rounds=3000)
    return [{"method": f"gossip {graph} {codec}" + (" --control" if control else ""), "runs": [
        fit(tandem, path, "gossip", graph=graph, codec=codec, **({"control": True, "seed": 0} if control else {"seed": seed}), **common)
        for seed in (SEEDS if codec != "none" and not control else [0])]}
        for graph in ("ring", "torus", "random4") for codec, control in (("none", False), ("int4", False), ("int3", False), ("int2", False), ("int4", True))]


def exact_with(tandem, path, nonzeros, **options):
    """Exact answer with about as many nonzeros, by bisection over l1."""
    low, high = 1e-6, 1e-3
    for _ in range(8):
        l1 = math.sqrt(low * high)
        run = fit(tandem, path, "average", clients=1, l1=l1, max_rounds=1, **options)
        if abs(run["optimal_nonzeros"] / nonzeros - 1) < .03:
            break
        low, high = (l1, high) if run["optimal_nonzeros"] > nonzeros else (low, l1)
    return run


def sparse(tandem, folder):
    test = folder + "/held-out.svm"
    path = make(folder + "/packages.svm", "--held-out", test)
    methods = []
    for l1 in (1e-4, 3e-5):
        common = dict(l1=l1, clients=8, ranks=2, shuffle=True, test=test)
        runs = {updates: fit(tandem, path, "proxcsl", max_rounds=1 + updates, **common) for updates in (2, 4)}
        methods += [{"method": f"proxcsl, l1 {l1:g}, {updates} updates", "runs": [run]} for updates, run in runs.items()]
        methods.append({"method": f"exact, as many nonzeros as l1 {l1:g}, 2 updates",
                        "runs": [exact_with(tandem, path, runs[2]["nonzeros"], shuffle=True, test=test)]})
    methods.append({"method": "proxcsl --control, l1 0.0001, 32 clients", "runs": [
        fit(tandem, path, "proxcsl", l1=1e-4, clients=32, ranks=2, shuffle=True, control=True, max_rounds=5)]})
    return methods


def walk(tandem, folder):
    path = data(folder, 3200, 100)
    return [{"method": f"{tokens} token{'s' * (tokens > 1)}", "runs": [
        fit(tandem, path, "api-bcd", l2="auto:kappa=10", clients=16, tokens=tokens, graph="random4", seed=seed, tol=1e-8, max_rounds=30000)
        for seed in SEEDS]} for tokens in (1, 2, 4, 8)]


def uneven(tandem, folder):
    """Rows in the order of their lengths, so that the last clients have several times the numbers of the first."""
    path, sorted_path = data(folder, 3200, 100), folder + "/packages-by-length.svm"
    with open(path) as rows, open(sorted_path, "w") as file:
        file.writelines(sorted(rows, key=lambda row: len(row.split())))
    common = dict(l2="auto:kappa=10", clients=16, graph="random4", ranks=4, tol=1e-3, max_rounds=30000)
    return [{"method": f"{tokens} token{'s' * (tokens > 1)}{', --async' * walks}{', ' + link if link else ''}", "runs": [
        fit(tandem, sorted_path, "api-bcd", tokens=tokens, seed=seed, **common, **({"async": True} if walks else {}), **({"link": link} if link else {}))
        for seed in SEEDS]} for link in ("20Mbit/s,10ms", None) for tokens in (1, 4) for walks in (False, True)]


def link(tandem, folder):
    path = data(folder, 12800, 1000)
    common = dict(l2="auto:kappa=100", clients=16, ranks=4, link="20Mbit/s,10ms", tol=1e-6, max_rounds=4000)
    return [{"method": method, "runs": [fit(tandem, path, method, **common, **options)]} for method, options in
            (("gd", {}), ("scaffnew", {"p": .15}), ("compressed-scaffnew", {"sparsity": 4, "p": .3}), ("tamuna", {"cohort": 4}))]


def commit():
    return subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True).stdout.strip()


def is_done(path):
    """Whether `path` has the results of this commit, to go on after an interruption."""
    if not os.path.exists(path) or commit().endswith("-dirty"):
        return False
    with open(path) as file:
        return json.load(file)["commit"] == commit()


CASES = {each.__name__: each for each in (convex, shuffled, steep, gossip, sparse, kappa, many, walk, uneven, link)}


def main():
    if len(sys.argv) < 3 or any(name not in CASES for name in sys.argv[3:]):
        sys.exit(__doc__)
    tandem, out = sys.argv[1:3]
    os.makedirs(out, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[3:] or CASES:
            if is_done(f"{out}/{name}.json"):
                continue
            result = {"command": f"bench/fit.py TANDEM OUT {name}", "hardware": cpu(), "commit": commit(),
                      "date": datetime.date.today().isoformat(), "methods": CASES[name](tandem, folder)}
            with open(f"{out}/{name}.json", "w") as file:
                json.dump(result, file, indent=1)
                file.write("\n")


if __name__ == "__main__":
    main()
