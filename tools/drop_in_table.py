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


WITHOUT = "no_collectives"


def over(forms, theirs):
    """Time of a form over that of Tandem's fastest."""
    return f'{forms[theirs] / min(time for form, time in forms.items() if form.startswith("tandem")):.2f}'


def title(form):
    return "without collectives, ms" if form == WITHOUT else f"`{form}`, ms"


def layers(files):
    """Steps of the layers."""
    found = [r for file in files.split(",") for r in results(file)]
    names = list(found[0]["time_us"]["step"])
    compared = [name for name in names if name != WITHOUT and not name.startswith("tandem")]
    rows = [[r["model"], str(r["layers"]), str(r["seq"]), *(f'{r["time_us"]["step"][n] / 1e3:.1f}' for n in names),
             *(over(r["time_us"]["step"], n) for n in compared)] for r in found]
    titles = ["model", "layers", "tokens", *map(title, names), *(f"over `{n}`" for n in compared)]
    text = about(found).replace("µs, medians", "medians")
    return f"{text}\n\n{markdown(titles, rows)}"


def megatron(file):
    """Passes of a GPT under Megatron-Core: a run for each form."""
    found = results(file)
    cases = {}
    for r in found:
        cases.setdefault((r["layers"], r["seq"], r["batch"]), {})[r["form"]] = r
    forms = ("stock", "tandem", WITHOUT)
    rows = []
    for (count, seq, batch), runs in cases.items():
        loss = abs(runs["tandem"]["loss"] / runs["stock"]["loss"] - 1)
        times = {form: runs[form]["time_us"]["step"] for form in forms}
        rows.append([str(count), f"{batch} × {seq}", *(f"{times[form] / 1e3:.1f}" for form in forms), over(times, "stock"), f"{loss:.0e}"])
    titles = ["layers", "tokens", *map(title, forms), "over `stock`", "losses differ by"]
    return f'{about(found).replace("µs, medians", "medians")}\n\n{markdown(titles, rows)}'
