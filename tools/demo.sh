#!/usr/bin/env bash
# demo.sh TANDEM OUT [CONFIG]: runs `make run` after tandem is built. Trains a Transformer on two
# tensor-parallel ranks on the headers under /usr/include, compares it with compressors on held-out
# files, samples from it, and times a step with communication exposed and hidden. Where GPUs are the
# default device, it trains on one.
#
# TANDEM_DEMO_SECONDS  seconds of training (default: CONFIG's)
# TANDEM_DEMO_LINK     emulated link for the step times (default: chosen by the GEMMs' speed)
set -euo pipefail

tandem=$1
out=$2
config=${3:-$(dirname "$0")/../configs/demo.toml}
link=()
[ -z "${TANDEM_DEMO_LINK:-}" ] || link=(--link "$TANDEM_DEMO_LINK")
began=$SECONDS

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] && [ -z "${NO_COLOR:-}" ] || say() { printf '\n== %s\n' "$*"; }

# Files of an earlier demo are replaced; anything else in the folder stays (such as your own runs).
written=(metrics.jsonl config.toml heldout.txt trace.json checkpoints final compared.txt eval.json
  sample.txt samples.jsonl started.json split run.json report.txt report.html summary.json)
# Records that those files are the demo's, by the identity of one of them; locked while it runs.
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

options=(--tp 2) ranks="two ranks" title="Tensor-parallel training"
if grep -q '^  default device  *gpu$' <<<"$("$tandem" info)"; then
  options=(--device gpu --set model.vocab=264) # on GPUs, rows of matrices are multiples of 8
  ranks="a GPU" title="Training on a GPU"
fi
[ -z "${TANDEM_DEMO_SECONDS:-}" ] || options+=(--set "train.seconds=$TANDEM_DEMO_SECONDS")
command="tandem train $(basename "$(dirname "$config")")/$(basename "$config") ${options[*]} --out $out"
say "Training on $ranks: $command"
"$tandem" train "$config" "${options[@]}" --set trace.enabled=true --out "$out"

cat >"$out/run.json" <<END
{
  "title": "$title on C++ headers",
  "command": "$command"
}
END
say "Held-out text, a sample, and the time of a step"
"$tandem" report "$out" --complete "${link[@]}" --prompt '#include <' >"$out/report.txt" ||
  { cat "$out/report.txt" >&2 && exit 1; }
head -c 1200 "$out/sample.txt"
echo

say "Result"
cat "$out/report.txt"
rm "$out/report.txt"
[ "$ranks" != "a GPU" ] ||
  printf '\nOne GPU has no communication to hide: TANDEM_DEVICE=cpu make run compares steps of CPU ranks.\n'
printf '\nOpen in a browser:         %s/report.html\n' "$out"
printf 'Open at ui.perfetto.dev:   %s/trace.json\n' "$out"
printf 'Try the model:             %s serve %s\n' "${tandem#"$PWD/"}" "$out"
printf 'Took %d s.\n' $((SECONDS - began))
