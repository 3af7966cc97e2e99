#!/usr/bin/env bash
# plan_test.sh TANDEM SOURCE_DIR: pictures, figures and errors of `tandem plan schedule`, and the
# table and picture of docs/results/pipelines.md; tables of `tandem plan placements`, with that of
# docs/guide/layouts.md.
set -eu
tandem=$1 source=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
fail() {
  echo "$1" >&2
  shift
  [ $# = 0 ] || cat "$@" >&2
  exit 1
}
says() { # TEXT ARG...: a line of the output
  text=$1
  shift
  "$tandem" plan schedule "$@" >log 2>&1 || fail "plan schedule $*:" log
  grep -qxF -- "$text" log || fail "plan schedule $*: expected the line '$text':" log
}
plan_refused() { # KIND CODE TEXT ARG...
  kind=$1 code=$2 text=$3
  shift 3
  status=0
  "$tandem" plan "$kind" "$@" >log 2>&1 || status=$?
  [ "$status" = "$code" ] || fail "plan $kind $*: exit $status, expected $code" log
  grep -qF -- "$text" log || fail "plan $kind $*: expected '$text':" log
  [ "$(wc -l <log)" = 1 ] || fail "plan $kind $*: expected one line:" log
}
refused() { plan_refused schedule "$@"; }

says '   0 F0 F1 ......B0    F2 B1    ...B2    ' --pp 2 --microbatches 3 --schedule 1f1b
says '   1 ...F0 B0    F1 B1    F2 B2    ......' --pp 2 --microbatches 3 --schedule 1f1b
says '   1 ...F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 I1 i2 I2 W1 w2 W2 ' --pp 2 --microbatches 3 --schedule zb-v --virtual 2
says "bubble            25.0 % of all ranks' time; published: 25.0 %" --pp 2 --microbatches 3 --schedule 1f1b
says '                  0.0 % between the first and the last pass of a rank' --pp 4 --microbatches 8 --schedule zb-v
says 'peak activations  8 of one stage and microbatch, 4 times those of a rank'"'"'s layers' \
  --pp 4 --microbatches 8 --schedule zb-v
says 'checked           every pass once, no rank waits forever, activations as the formula' \
  --pp 4 --microbatches 8 --schedule dualpipe-v
says 'makespan          32, with forward 2, backward 3 + 1, transfer 10' \
  --pp 2 --microbatches 1 --schedule 1f1b --costs 2,3,1 --transfer 10
says '   1 ......F0    RRRB0    .........' --pp 2 --microbatches 1 --schedule 1f1b --costs 1,0.5,0.5 --recompute 0.5
says 'makespan          5, with forward 1, backward 0.5 + 0.5, transfer 0, recomputation 0.5' \
  --pp 2 --microbatches 1 --schedule 1f1b --costs 1,0.5,0.5 --recompute 0.5
says 'The picture needs 809 columns, more than 120: --svg FILE draws it.' --pp 4 --microbatches 64 --schedule 1f1b --costs 1,0.5,0.5
# Every schedule of a small shape fits 120 columns.
for name in gpipe 1f1b interleaved zb-h1 zb-v dualpipe-v; do
  "$tandem" plan schedule --pp 4 --microbatches 8 --schedule "$name" --svg "$name.svg" >log
  grep -q '^   3 \.\.' log || fail "$name: expected a picture:" log
  ! grep -E '.{121}' log || fail "$name: wider than 120 columns"
  python3 - "$name.svg" <<'END'
import sys, xml.etree.ElementTree as xml
passes = [e for e in xml.parse(sys.argv[1]).iter() if e.tag.endswith("rect") and e.get("height") == "24"]
assert len(passes) >= 4 + 2 * 8 * 4, len(passes)
END
done
cmp zb-v.svg "$source/docs/images/pipeline-zb-v.svg" ||
  fail 'docs/images/pipeline-zb-v.svg is not what tandem plan schedule --pp 4 --microbatches 8 --schedule zb-v --svg draws'

"$tandem" plan schedule --pp 4 --microbatches 8 --schedule zb-h1 --json - >printed.json
says 'Wrote h1.svg' --pp 4 --microbatches 8 --schedule zb-h1 --json written.json --svg h1.svg
cmp printed.json written.json
"$tandem" plan schedule --pp 4 --microbatches 8 --json all.json >table
python3 - <<'END'
import json
h1 = json.load(open("printed.json"))
assert (h1["schedule"], h1["pp"], h1["microbatches"], h1["virtual"]) == ("zb-h1", 4, 8, 1), h1
assert abs(h1["bubble"] - 3 / 27) < 1e-9 and abs(h1["published_bubble"] - 3 / 27) < 1e-9, h1
assert h1["peak_activations"] == 4 and h1["rank_peak_activations"] == [4] * 4, h1
assert [len(passes) for passes in h1["ranks"]] == [24] * 4
assert h1["ranks"][1][0] == {"pass": "forward", "stage": 1, "microbatch": 0, "begin": 1, "end": 2}, h1["ranks"][1][0]
every = json.load(open("all.json"))
assert [s["schedule"] for s in every] == ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]
END
[ "$(wc -l <table)" = 8 ] || fail 'expected six schedules:' table
while read -r line; do
  grep -qxF -- "$line" "$source/docs/results/pipelines.md" || fail "docs/results/pipelines.md has no line '$line'"
done <table
says 'schedule "interleaved" with 6 microbatches: expected a multiple of its 4 ranks' --pp 4 --microbatches 6

shape=(--pp 4 --microbatches 8)
refused 2 'schedule "2f2b": expected one of "gpipe", "1f1b", "interleaved"' "${shape[@]}" --schedule 2f2b
refused 2 'schedule "interleaved" with 6 microbatches: expected a multiple of its 4 ranks' \
  --pp 4 --microbatches 6 --schedule interleaved
refused 2 'schedule "dualpipe-v" with 7 microbatches: expected at least 8, twice its ranks' \
  --pp 4 --microbatches 7 --schedule dualpipe-v
refused 2 'schedule "1f1b" with 2 stages per rank: expected 1' "${shape[@]}" --schedule 1f1b --virtual 2
refused 2 'schedule "zb-v" with 3 stages per rank: expected 2' "${shape[@]}" --schedule zb-v --virtual 3
refused 2 '--microbatches is missing: Microbatches of a step (see tandem plan schedule --help)' --pp 4
refused 2 '--pp: Value 0 not in range' --pp 0 --microbatches 8
refused 2 '--costs -1: expected three numbers from 1e-6 to 1e6' "${shape[@]}" --costs 1,-1,1
refused 2 '--costs: nan: expected a number' "${shape[@]}" --costs 1,1,nan
refused 2 '--costs: At least 3 required but received 2' "${shape[@]}" --costs 1,1
refused 2 '--transfer: Value -1 not in range' "${shape[@]}" --transfer -1
refused 2 '--virtual without --schedule: expected both' "${shape[@]}" --virtual 2
refused 2 '--svg without --schedule: expected both' "${shape[@]}" --svg x.svg
refused 2 '--svg and --json: both x: expected two files' "${shape[@]}" --schedule 1f1b --svg x --json x
refused 2 'unknown option --shedule: did you mean --schedule? (see tandem plan schedule --help)' \
  "${shape[@]}" --shedule 1f1b
refused 2 'plan schedule: 4096 microbatches on each of 1024 stages: expected at most 262144 in all' \
  --pp 512 --microbatches 4096
refused 3 '/nowhere/x.svg: cannot open: No such file' "${shape[@]}" --schedule 1f1b --svg /nowhere/x.svg

# Of learners the layout of each, with what their exchanges take; the written job trains.
cat "$source/configs/tiny.toml" - >learners.toml <<'TOML'
[parallel]
dp = 2
[sync]
method = "local"
learners = 2
every = 8
fragments = 2
delay = 2
TOML
printf 'gpu = "H100"\ngpus_per_host = 8\n[link]\nhost = 450\nnetwork = 50\nlearners = 1e-3\n' >far.toml
printf '[parallel]\ncp = 2\n' | cat "$source/configs/gpu-tiny.toml" - >context.toml
"$tandem" plan context.toml --gpus 2 --hardware far.toml --out context-planned.toml --json context.json >log
grep -q '^With context parallelism, which training has on CPU ranks only; no GPU runs these yet:$' log
"$tandem" plan context.toml --gpus 2 --hardware far.toml --dp-formats --json context-cpu.json >log
! grep -q '^With context parallelism' log
python3 - <<'EOP'
import json
gpus, cpus = json.load(open("context.json")), json.load(open("context-cpu.json"))
assert [l["cp"] for l in gpus["fastest"]] == [1] * len(gpus["fastest"]) and gpus["best"]["cp"] == 1, gpus
assert gpus["not_on_gpus"] and all(l["cp"] == 2 for l in gpus["not_on_gpus"]), gpus
assert cpus["not_on_gpus"] == [] and {l["cp"] for l in cpus["pareto"] + cpus["fastest"]} == {1, 2}, cpus
EOP
! grep -q '^cp' context-planned.toml
plan_refused context.toml 2 '--page with cp of up to 2: expected parallel.cp = 1' --gpus 2 --hardware far.toml --page x.html
plan_refused learners.toml 2 'sync.learners with cp of up to 4: expected --max-cp = 1' --gpus 4 --hardware far.toml --max-cp 4
plan_refused learners.toml 2 '--gpus 3: expected a multiple of sync.learners = 2' --gpus 3 --hardware far.toml
plan_refused learners.toml 2 '--page with sync.learners = 2: expected a job of one learner' --gpus 4 --hardware far.toml --page x.html
plan_learners() { # FILE SED-EXPRESSION: plans with another line of the job
  sed "$2" learners.toml >changed.toml
  "$tandem" plan changed.toml --gpus 4 --hardware far.toml --dp-formats --out learners-planned.toml --json "$1" >log
}
plan_learners far.json ''
"$tandem" train learners-planned.toml --set train.steps=9 --set "data.paths=$source/include/tandem" --out far >log 2>&1 ||
  fail 'train the planned job of learners:' log
plan_learners late.json '/^delay/d'
plan_learners never.json 's/^every = 8/every = 800/'
"$tandem" plan learners.toml --gpus 4 --hardware far.toml --dp-formats >log
grep -qF '2 learners of 2 GPUs each. Exchange of the fastest layout, every 8 steps in 2 fragments, applied 2 steps later:' log ||
  fail 'plan of learners: expected a table:' log
python3 - <<'END'
import json
far, late, never = (json.load(open(name + ".json"))["best"] for name in ("far", "late", "never"))
for best in far, late, never:
    assert best["tp"] * best["pp"] * best["dp"] == 2, best
    exchange = best["exchange"]
    assert abs(exchange["sent_bytes"] / 1e6 - exchange["seconds"]) < 1e-9, exchange
    assert exchange["exposed_s"] == best["terms_s"]["sync"], best
    assert exchange["memory_gib"] > 0
# Two fragments in 8 steps; with a delay two steps go on meanwhile.
step = lambda best: best["predicted_s"] - best["exchange"]["exposed_s"]
exposed = lambda best, delay: max(0, best["exchange"]["seconds"] - delay * step(best)) * 2 / 8
assert abs(exposed(far, 2) - far["exchange"]["exposed_s"]) < 1e-9, far
assert abs(exposed(late, 0) - late["exchange"]["exposed_s"]) < 1e-9, late
assert late["exchange"]["exposed_s"] > far["exchange"]["exposed_s"] >= 0
assert abs(far["sent_bytes"]["sync"] / never["sent_bytes"]["sync"] - 100) < 1e-6, (far, never)
# What the run has sent in an exchange of each fragment; the plan leaves out norms.
sent = [json.loads(line)["sent_bytes"]["sync"] for line in open("far/metrics.jsonl")]
assert abs(sum(sent[:8]) / 8 / far["sent_bytes"]["sync"] - 1) < .02, (sent, far)
END

# Placements: the documented lines, every layer, JSON, and errors.
"$tandem" plan placements "$source/configs/moe.toml" --tp 2 --dp 4 --ep 2 >table
sed -n '/^| tensor | tp 2 /,/^$/p' "$source/docs/guide/layouts.md" | grep . >documented
[ "$(wc -l <documented)" -ge 10 ] || fail 'docs/guide/layouts.md: expected a table of placements' documented
while read -r line; do
  grep -qxF -- "$line" table || fail "plan placements: expected the documented line '$line':" table
done <documented
grep -q 'tensors; every operator can consume its operands' table || fail 'plan placements:' table
"$tandem" plan placements "$source/configs/moe.toml" --tp 2 --dp 4 --ep 2 --pp 2 --all >table
grep -qxF '| model.layers.1.block_sparse_moe.gate.weight, gradient | replicated | – | partial | partial | rank 1 | all_reduce |' table ||
  fail 'plan placements --all:' table
"$tandem" plan placements "$source/configs/tiny.toml" --json - >printed.json
"$tandem" plan placements "$source/configs/tiny.toml" --set parallel.tp=2 --json written.json >table
python3 - <<'END'
import json
one, two = (json.load(open(name)) for name in ("printed.json", "written.json"))
assert one["axes"] == {"tp": 1, "cp": 1, "ep": 1, "expert_dp": 1, "pp": 1} and two["axes"]["tp"] == 2
assert one["tensors"] == two["tensors"], "placements depend on sizes"
loss = next(t for t in two["tensors"] if t["tensor"] == "loss")
assert loss == {"tensor": "loss", "tp": "replicated", "cp": "partial", "ep": "partial", "expert_dp": "partial", "pp": "rank 0",
                "made_by": "cross_entropy"}, loss
END
plan_refused placements 2 'heads' "$source/configs/tiny.toml" --tp 3
plan_refused placements 2 'config is missing: Job file (TOML)'
plan_refused placements 2 '--tp: Value 0 not in range' "$source/configs/tiny.toml" --tp 0
plan_refused placements 3 '/nowhere/x.json: cannot be written' "$source/configs/tiny.toml" --json /nowhere/x.json

# plan --fit: contract of the JSON, a split, and errors of one line.
runs=$source/bench/published/runs.csv
"$tandem" plan --fit "$runs" --predict "$runs" --json - >fit.json
python3 - fit.json <<'END'
import json, sys
found = json.load(open(sys.argv[1]))
rows = [r for r in found["rows"] if r["step_s"]]
assert len(rows) > 300 and all(r["id"] and r["predicted_s"] > 0 for r in rows)
errors = [100 * abs(r["predicted_s"] / r["step_s"] - 1) for r in rows]
assert abs(sum(errors) / len(errors) - found["mape"]) < 1e-6 and abs(max(errors) - found["worst"]) < 1e-6
assert found["mape"] < found["constant_flops_mape"]
assert all(abs(sum(r["shares"].values()) - 1) < .01 for r in rows)
assert found["skipped"] and all(r["reason"] for r in found["skipped"])
END
# Bytes that are no UTF-8 are replaced.
head -40 "$runs" | LC_ALL=C sed '5s/^/\xff/' >bytes.csv
"$tandem" plan --fit bytes.csv --predict bytes.csv --json bytes.json >log 2>&1 || fail 'plan --fit of bytes that are no UTF-8:' log
python3 -c 'import json; rows = json.load(open("bytes.json", encoding="utf-8")); assert any("\ufffd" in str(r) for r in rows["rows"] + rows["skipped"])'
"$tandem" plan --fit "$runs" --leave-out model --where group=mosaic-mpt,gpu=H100,precision=bf16 >log
grep -qx 'split           every model from the others' log || fail 'plan --leave-out: expected the split:' log
fit_refused() { # CODE TEXT ARG...
  code=$1 text=$2
  shift 2
  status=0
  "$tandem" plan "$@" >log 2>&1 || status=$?
  [ "$status" = "$code" ] || fail "plan $*: exit $status, expected $code" log
  grep -qF -- "$text" log || fail "plan $*: expected '$text':" log
  [ "$(wc -l <log)" = 1 ] || fail "plan $*: expected one line:" log
}
sed '3s/,2048,H100/,many,H100/;3s/,4096,H100/,many,H100/' "$runs" >bad.csv
fit_refused 2 'bad.csv:3 (megatron-h100-weak-2): column seq: many: expected a positive number or nothing' --fit bad.csv
fit_refused 3 'missing.csv' --fit missing.csv
fit_refused 2 'gpuz: no such column: did you mean gpu' --fit "$runs" --where gpuz=H100
fit_refused 2 '--where gpu=H300: no row matches' --fit "$runs" --where gpu=H300
fit_refused 2 'expected one of them' --fit "$runs" --predict "$runs" --leave-out model
fit_refused 2 '--fit' --predict "$runs"

# plan CONFIG: a job file that train takes, and what is missing.
cat >h100.toml <<'END'
gpu = "H100"
gpus_per_host = 8
[link]
host = 450
network = 50
END
"$tandem" plan "$source/configs/gpu-tiny.toml" --gpus 4 --hardware h100.toml --fit "$runs" --out planned.toml --json plan.json >log
python3 - plan.json planned.toml <<'END'
import json, sys
found = json.load(open(sys.argv[1]))
best = found["best"]
assert best["tp"] * best["pp"] * best["dp"] == 4 and found["considered"] >= found["fitting"] > 0
assert best["predicted_s"] == min(r["predicted_s"] for r in found["fastest"])
import tomllib
job = tomllib.load(open(sys.argv[2], "rb"))
assert job["parallel"].get("tp", 1) == best["tp"] and job["parallel"].get("dp", 1) == best["dp"], job
END
"$tandem" plan placements planned.toml >log || fail 'the planned job:' log
# ZeRO stages and wire formats: only within the accuracy; the written job trains.
plan_job() { # ARG...: plans gpu-tiny.toml for four GPUs of two hosts with slow links
  sed 's/gpus_per_host = 8/gpus_per_host = 2/;s/host = 450/host = 0.5/;s/network = 50/network = 0.01/' h100.toml >slow.toml
  "$tandem" plan "$source/configs/gpu-tiny.toml" --gpus 4 --hardware slow.toml --out planned.toml --json plan.json "$@" >log
}
for options in '' '--accuracy int8' '--accuracy 10% --dp-formats'; do
  rm -rf trained
  # shellcheck disable=SC2086
  plan_job $options
  python3 - "$options" plan.json planned.toml <<'END'
import json, sys, tomllib
options, found, job = sys.argv[1], json.load(open(sys.argv[2])), tomllib.load(open(sys.argv[3], "rb"))["parallel"]
limit = .1 if "10%" in options else .0041 if "int8" in options else 0
layouts = found["fastest"] + found["pareto"]
assert all(layout["error"] <= limit for layout in layouts)
assert {layout["zero"] for layout in layouts} <= {0, 1, 2}
codecs = {layout["codec"] for layout in layouts}
assert (codecs != {"none"}) == bool(options), codecs
assert any("gradients" in codec for codec in codecs) == ("dp-formats" in options), codecs
assert job.get("codec", "none") == found["best"]["codec"], job
assert (found["best"]["codec"] != "none") == bool(options), job
assert job.get("zero", 1) == found["best"]["zero"], job
END
  "$tandem" train planned.toml --set train.steps=2 --set "data.paths=$source/include/tandem" --out trained >log 2>&1 ||
    fail "train the job planned with '$options':" log
done
"$tandem" plan "$source/configs/gpu-tiny.toml" --gpus 4 --hardware slow.toml --dp-formats |
  grep -qxF 'With --dp-formats the job is one for CPU ranks.' || fail 'plan --dp-formats: expected a note'
fit_refused 2 "--accuracy int9: codec 'int9'" "$source/configs/gpu-tiny.toml" --gpus 4 --hardware h100.toml --accuracy int9
fit_refused 2 '--accuracy' --fit "$runs" --accuracy int8
fit_refused 2 '--hardware is missing' "$source/configs/gpu-tiny.toml" --gpus 4
fit_refused 2 'expected GPUs = tp x pp x dp' "$source/configs/gpu-tiny.toml" --gpus 4096 --hardware h100.toml
sed -i '/host = 450/d' h100.toml
fit_refused 2 'h100.toml: no key link.host: expected GB/s of a GPU in one direction' "$source/configs/gpu-tiny.toml" --gpus 4 --hardware h100.toml
printf 'gpu = "H100"\ngpus_per_host = 8\nmemory_gib = 0.001\n[link]\nhost = 450\nnetwork = 50\n' >small.toml
fit_refused 2 'no layout fits 4 GPUs: the smallest needs' "$source/configs/gpu-tiny.toml" --gpus 4 --hardware small.toml
