#!/usr/bin/env bash
# help_examples_test.sh TANDEM MPIRUN|- SOURCE_DIR: the examples in the help texts work, each run once
# verbatim, one after another, in a folder with small models in configs and little text in include. (Those of
# `bench` take long and are skipped.)
set -u
tandem=$1 mpirun=$2 source=$3
failures=0
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
PATH=$(dirname "$tandem"):$PATH
export TANDEM_CACHE_DIR=$dir/cache TANDEM_TUNE=0
mkdir -p "$dir/configs" "$dir/include/tandem"
for config in tiny moe; do
  sed -E 's/^(hidden|head_dim|ffn|layers|batch|seq) = .*/\1 = SMALL_\1/
    s/SMALL_hidden/16/; s/SMALL_head_dim/4/; s/SMALL_ffn/32/; s/SMALL_layers/2/
    s/SMALL_batch/4/; s/SMALL_seq/32/' "$source/configs/$config.toml" >"$dir/configs/$config.toml"
done
for header in error norm quantize random strategy; do
  cp "$source/include/tandem/$header.h" "$dir/include/tandem" || exit 1
done
grep -q SMALL_ "$dir"/configs/*.toml && exit 1
cd "$dir" || exit 1
printf '{"prompt": "int main"}\n{"prompt": "#include", "max_tokens": 3}\n' >prompts.jsonl
for row in $(seq 40); do echo "$((row > 20)) $((1 + row % 3)):1 5:0.$row"; done >data.svm
# Hosts of which each is this machine.
mkdir bin
printf '#!/bin/sh\nfor command; do :; done\nexec sh -c "$command"\n' >bin/ssh
chmod +x bin/ssh
PATH=$dir/bin:$PATH
printf 'a\nb\n' >hosts.txt

examples() { # of a help text, without their descriptions
  "$tandem" $1 --help | sed -nE 's/^  ((tandem|mpirun -n [0-9]+ tandem) .*)/\1/p' | sed -E 's/   *[^ ].*//'
}
mapfile -t lines < <(for command in '' train doctor eval tune generate trace 'plan schedule' 'plan placements' launch fit check-layout 'data check' 'data index' 'data verify'; do examples "$command"; done | awk '!seen[$0]++')
for line in "${lines[@]}"; do
  case $line in
    "tandem bench"*) line="\"\$tandem\" ${line#tandem} --repeats 2" ;;
    mpirun*)
      [ "$mpirun" != - ] || continue
      line="$mpirun $(sed -E 's/^mpirun -n ([0-9]+) tandem/\1 "$tandem"/' <<<"$line")"
      ;;
    *) line="\"\$tandem\" ${line#tandem}" ;;
  esac
  eval "$line" >"$dir/log" 2>&1 </dev/null || {
    printf 'failed: %s\n%s\n' "$line" "$(cat "$dir/log")" >&2
    failures=$((failures + 1))
  }
done
[ ${#lines[@]} -ge 15 ] || { echo "only ${#lines[@]} examples found" >&2; failures=1; }
exit $((failures > 0))
