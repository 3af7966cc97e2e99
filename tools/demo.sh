#!/usr/bin/env bash
# demo.sh TANDEM OUT [CONFIG]: what `make run` does once tandem is built. Trains a Transformer on
# two tensor-parallel ranks on the headers under /usr/include, compares it with compressors on
# files it never saw, samples from it, and times a step with communication exposed and hidden.
#
# TANDEM_DEMO_SECONDS  seconds of training (what CONFIG says)
# TANDEM_DEMO_EVAL_BYTES  about how much held-out text to compare on (200000)
# TANDEM_DEMO_LINK     the link to emulate for the step times (below)
set -euo pipefail

tandem=$1
out=$2
config=${3:-$(dirname "$0")/../configs/demo.toml}
link=${TANDEM_DEMO_LINK:-400MB/s,30us}
prompt='#include <'
eval_bytes=${TANDEM_DEMO_EVAL_BYTES:-200000} # of held-out text, so that this part takes seconds
split_steps=24
began=$SECONDS

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] || say() { printf '\n== %s\n' "$*"; }

# What an earlier demo wrote is replaced; anything else in the folder stays (your own runs beside it).
written=(metrics.jsonl config.toml heldout.txt trace.json checkpoints final compared.txt eval.json
  sample.txt split split-serial.log split-overlapped.log run.json report.html summary.json)
# Says that those names in the folder are the demo's, by which file one of them is; locked while
# it runs.
mark=$out/.demo
identity() { stat -c '%i %w' "$out/metrics.jsonl" 2>/dev/null || true; }
is_demo() { [ -e "$mark" ] && [ "$(cat "$mark")" = "$(identity)" ]; }
for name in "${written[@]}"; do
  if [ -e "$out/$name" ] && ! is_demo; then
    echo "demo: $out/$name is not known to be from an earlier demo: move $out away, or choose another folder" >&2
    exit 2
  fi
done
if [ -e "$out/.lock" ] && ! flock -n "$out/.lock" true; then
  echo "demo: a training writes to $out now" >&2
  exit 2
fi
mkdir -p "$out"
exec 9>>"$mark"
flock -n 9 || { echo "demo: another demo writes to $out now" >&2; exit 2; }
trap 'identity >"$mark"' EXIT
for name in "${written[@]}"; do rm -rf "${out:?}/$name"; done

options=(--tp 2)
[ -z "${TANDEM_DEMO_SECONDS:-}" ] || options+=(--set "train.seconds=$TANDEM_DEMO_SECONDS")
command="tandem train $(basename "$(dirname "$config")")/$(basename "$config") ${options[*]} --out $out"
say "Training on two ranks: $command"
"$tandem" train "$config" "${options[@]}" --set trace.enabled=true --out "$out"

# Held-out files: every so-manieth of the list, up to eval_bytes in all.
files=()
total=0
mapfile -t held <"$out/heldout.txt"
sizes=$(for file in "${held[@]}"; do stat -L -c '%s' "$file" 2>/dev/null || true; done |
  awk '{ s += $1 } END { printf "%d", s }')
every=$(((sizes + eval_bytes - 1) / eval_bytes))
[ "$every" -ge 1 ] || every=1
for ((i = 0; i < ${#held[@]}; i += every)); do
  size=$(stat -L -c '%s' "${held[i]}" 2>/dev/null || echo 0)
  if [ "$size" -gt 0 ] && [ $((total + size)) -le $((2 * eval_bytes)) ]; then
    files+=("${held[i]}")
    total=$((total + size))
  fi
done
say "Held-out text: ${#files[@]} of ${#held[@]} files, $total bytes, each file alone"
compressed() { # COMMAND...: bytes of all files, each compressed alone
  for file in "${files[@]}"; do "$@" <"$file" | wc -c; done | awk '{ s += $1 } END { printf "%d", s }'
}
gzip_bytes=$(compressed gzip -9 -c)
xz_bytes=$(compressed xz -9 -c)
printf '%s\n' "${files[@]}" >"$out/compared.txt"
"$tandem" eval "$out/final" --list "$out/compared.txt" --tp 2 --json "$out/eval.json"
model_bits=$(sed -n 's/.*"bits_per_byte": *\([0-9.eE+-]*\).*/\1/p' "$out/eval.json" | head -n 1)

say "A sample"
"$tandem" generate "$out/final" --prompt "$prompt" --tp 2 --temperature 0.8 --top-p 0.95 --seed 1 \
  --max-tokens 600 >"$out/sample.txt"
head -c 1200 "$out/sample.txt"
echo

# Ticks of processor time until now: of the whole machine, host's included, and of what this script ran.
ticks() { awk 'FILENAME == "/proc/stat" && $1 == "cpu" { all = $2 + $3 + $4 + $7 + $8 + $9 }
  FILENAME != "/proc/stat" { own = $16 + $17 } END { print all + 0, own + 0 }' /proc/stat "/proc/$$/stat"; }

say "Step time on an emulated link of $link: serial, then overlapped"
read -r all_before own_before <<<"$(ticks)"
timed=$(date +%s%N)
for strategy in serial overlapped; do
  "$tandem" train "$config" --tp 2 --out "$out/split/$strategy" \
    --set "train.steps=$split_steps" --set train.seconds=0 --set checkpoint.every=0 \
    --set trace.enabled=true --set trace.steps=1 \
    --set "parallel.strategy=$strategy" --set "parallel.link=$link" >"$out/split-$strategy.log" 2>&1 ||
    { cat "$out/split-$strategy.log" >&2 && exit 1; }
  rm -rf "$out/split/$strategy/final" "$out/split-$strategy.log"
done

read -r all_after own_after <<<"$(ticks)"
processors=$(grep -c '^cpu[0-9]' /proc/stat)
others=$(awk -v others=$((all_after - all_before - own_after + own_before)) -v ns=$(($(date +%s%N) - timed)) \
  -v rate=$((processors * $(getconf CLK_TCK))) 'BEGIN { printf "%d", 100 * others / (rate * ns / 1e9) }')

cat >"$out/run.json" <<END
{
  "title": "Tensor-parallel training on C++ headers",
  "command": "$command",
  "link": "emulated ${link/,/ }",
  "prompt": "$prompt",
  "heldout": {
    "files": ${#files[@]},
    "bytes": $total,
    "model_bits_per_byte": ${model_bits:-null},
    "compressors": [
      {"name": "gzip -9", "bytes": $gzip_bytes},
      {"name": "xz -9", "bytes": $xz_bytes}
    ]
  }
}
END

say "Result"
"$tandem" report "$out"
if [ "$others" -ge 15 ]; then
  printf '\nOther programs kept %d %% of the %d processors busy while steps were timed: those times, and E, are of a\nbusy machine. Run this again when it is idle.\n' "$others" "$processors"
fi
printf '\nOpen in a browser:         %s/report.html\n' "$out"
printf 'Open at ui.perfetto.dev:   %s/trace.json\n' "$out"
printf 'Took %d s.\n' $((SECONDS - began))
