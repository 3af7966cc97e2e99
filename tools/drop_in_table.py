"""drop_in_table.py: Markdown tables of bench/drop_in: calls of PyTorch's fused operators, and
training steps of layers that use them. For tools/tables.py."""
import statistics

from bench_results import ROOT, load, markdown

FORMS = ("eager", "torch", "tandem")


def results(file):
    return [r for r in load(ROOT / file) if "op" in r]


def about(found):
    r = found[0]
    versions = f'PyTorch {r["versions"]["torch"]}, NCCL {r["versions"]["nccl"]}'
    return f'{r["hardware"]}, {versions}; commit {r["commit"]}; µs, medians, slowest rank; all correct.'


def ratio(r, field, form="torch"):
    return r[field][form] / r[field]["tandem"]


def calls(file):
    """A row for each product and token count: time with the host hidden, time of a call on an idle
    GPU, and time of the host."""
    found = results(file)
    rows = [[r["model"], r["product"], str(r["m"]), *(f'{r["time_us"][form]:.0f}' for form in FORMS),
             f'{ratio(r, "time_us"):.2f}', *(f'{r["called_us"][form]:.0f}' for form in FORMS),
             f'{ratio(r, "called_us"):.2f}', *(f'{r["host_us"][form]:.0f}' if r["host_us"] else "–" for form in FORMS)]
            for r in found]
    titles = ["model", "product", "M", "NCCL", "PyTorch's kernel", "Tandem", "×", "called: NCCL", "PyTorch's", "Tandem", "×",
              "host: NCCL", "PyTorch's", "Tandem"]
    large = [ratio(r, "time_us") for r in found if r["m"] >= 2048]
    summary = (f"Over PyTorch's kernel: median {statistics.median(large):.2f}× from M 2,048 on, least "
               f'{min(ratio(r, "time_us") for r in found):.2f}× of all with the host hidden and '
               f'{min(ratio(r, "called_us") for r in found):.2f}× as called.')
    return f"{about(found)} {summary}\n\n{markdown(titles, rows)}"


def layers(files):
    """Steps of the layers."""
    found = [r for file in files.split(",") for r in results(file)]
    names = list(found[0]["time_us"]["step"])
    rows = [[r["model"], str(r["layers"]), str(r["seq"]), *(f'{r["time_us"]["step"].get(n, 0) / 1e3:.1f}' for n in names),
             *(f'{r["time_us"]["step"][n] / min(r["time_us"]["step"][f] for f in names if f.startswith("tandem")):.2f}'
               for n in names if not n.startswith("tandem"))] for r in found]
    titles = ["model", "layers", "tokens", *(f"`{n}`, ms" for n in names),
              *(f"over `{n}`" for n in names if not n.startswith("tandem"))]
    text = about(found).replace("µs, medians", "medians")
    return f"{text}\n\n{markdown(titles, rows)}"
