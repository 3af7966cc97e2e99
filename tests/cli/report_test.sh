#!/usr/bin/env bash
# report_test.sh TANDEM: the report of a user's run is as complete as the demo's once --complete has measured
# the rest, on different files and with steps in turns.
set -eu
tandem=$1 here=$(cd "$(dirname "$0")" && pwd)
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TANDEM_THREADS=1 TANDEM_CACHE_DIR=$dir/cache TANDEM_TUNE=0
fail() { printf '%s\n' "$@" >&2; exit 1; }
mkdir "$dir/text"
for i in {1..20}; do seq "$i" $((i + 400)) | tee "$dir/text/$i" >"$dir/text/copy-of-$i"; done
cat >"$dir/job.toml" <<END
[model]
hidden = 32
layers = 1
heads = 2
kv_heads = 2
head_dim = 16
ffn = 64
max_seq = 64
[train]
steps = 2
seq = 32
batch = 2
dtype = "f32"
[data]
paths = ["text"]
val_fraction = 0.3
END
cd "$dir"
"$tandem" train job.toml --tp 2 --out out 2>log || fail "$(cat log)"
"$tandem" doctor out >text.txt || fail "doctor: $(cat text.txt)"
grep -q '^2 steps up to step 2: .*; 2 ranks on 1 host$' text.txt || fail "doctor: $(cat text.txt)"
[ "$(grep -vc '^did not overlap: [a-z_]*: m 64 .*, 2 ranks: automatic ran as serial: ' text.txt)" = 5 ] ||
  fail "doctor: $(cat text.txt)"
"$tandem" report out --tensorboard >text.txt
grep -q '^Wrote 2 steps to out/tensorboard/events.out.tfevents.tandem$' text.txt || fail "tensorboard: $(cat text.txt)"
"$here/tensorboard_reader.py" out || fail "tensorboard"
if "$tandem" report text --tensorboard 2>text.txt; then fail "tensorboard without a run"; fi
grep -q 'text/metrics.jsonl' text.txt || fail "tensorboard without a run: $(cat text.txt)"
rm -r out/ranks
if "$tandem" doctor out >text.txt 2>&1; then fail "doctor without records: $(cat text.txt)"; fi
grep -q '^tandem: .*out/ranks: no records: expected those of a run with trace.ranks$' text.txt ||
  fail "doctor without records: $(cat text.txt)"
"$tandem" report out >text.txt
grep -q 'Not shown: .*tandem report --complete' text.txt || fail "before: $(cat text.txt)"
"$tandem" report out --complete --link 2GB/s,1us --prompt '1' >text.txt 2>log || fail "$(cat log)" "$(cat text.txt)"
for shown in 'Held-out text: [0-9]* files' 'xz -9 ' 'emulated 2.* link' 'overlapped was faster in [0-9]* of [0-9]* pairs' 'chance alone' 'E = 1'; do
  grep -q "$shown" text.txt || fail "no $shown in" "$(cat text.txt)"
done
! grep 'Not shown: .*--complete' text.txt || fail "something was not measured"
[ "$(xargs cat <out/compared.txt | wc -c)" -gt 0 ] || fail "no text was compared"
[ "$(xargs md5sum <out/compared.txt | cut -d' ' -f1 | sort | uniq -d | wc -l)" = 0 ] ||
  fail "one text was compared twice:" "$(cat out/compared.txt)"
[ "$(head -c 1 out/sample.txt)" = 1 ] || fail "sample: $(cat out/sample.txt)"
pairs=$(wc -l <out/split/serial/metrics.jsonl)
[ "$pairs" -ge 24 ] && [ "$pairs" -le 100 ] && [ ! -e out/split/serial/final ] && [ ! -e out/split/load ] ||
  fail "split: $(ls out/split/*)"
! grep -q 'link chosen' text.txt || fail "chose a link instead of the given one"
rm -r out/split
"$tandem" report out --complete >text.txt 2>log || fail "$(cat log)"
grep -q '^link chosen so that the [0-9].* of GEMMs$' text.txt || fail "no link chosen: $(cat text.txt)"
before=$(stat -c %Y out/split/serial/metrics.jsonl)
"$tandem" report out --complete >/dev/null 2>log || fail "$(cat log)"
[ "$before" = "$(stat -c %Y out/split/serial/metrics.jsonl)" ] || fail "measured again"
