#!/usr/bin/env bash
# train_test.sh TANDEM LAUNCH MPIRUN|- CONFIG: training on processes, with and without MPI, ends with the bits
# of a run on threads; evaluation, generation and benchmarks run on processes, too.
set -eu
tandem=$1 launch=$2 mpirun=$3 config=$4
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TANDEM_THREADS=1 TANDEM_CACHE_DIR=$dir/cache TANDEM_TUNE=0
fail() { echo "$1" >&2; exit 1; }

# run NAME COMMAND...: logs the output, which is shown on failure.
run() {
  local name=$1
  shift
  "$@" > "$dir/$name.log" 2>&1 || fail "$name: $(cat "$dir/$name.log")"
}
train() { # NAME [LAUNCHER...]
  local name=$1
  shift
  run "$name" "$@" "$tandem" train "$config" --tp 2 --dp 2 --out "$dir/$name" --set train.steps=4
}
same() { cmp "$dir/threads/final/model.safetensors" "$dir/$1/final/model.safetensors" || fail "$1 differs"; }

train threads
train processes "$launch" 4
same processes
TANDEM_MPI_SHM=0 train sockets "$launch" 4
same sockets
train launched "$tandem" launch -n 4 --
same launched
if [ "$mpirun" != - ]; then
  train mpi "$mpirun" 4
  same mpi
fi
[ "$(grep -c '^Done at step 4' "$dir/processes.log")" = 1 ] || fail "processes: not one rank spoke"

run eval-1 "$tandem" eval "$dir/processes" --data "$config" --tp 2
run eval-2 "$launch" 2 "$tandem" eval "$dir/processes" --data "$config"
diff <(grep -v ' s$\|tokens/s' "$dir/eval-1.log") <(grep -v ' s$\|tokens/s' "$dir/eval-2.log") ||
  fail "eval on processes differs"
run generate-1 "$tandem" generate "$dir/processes" --prompt ab --tp 2 --max-tokens 8 --temperature 0
run generate-2 "$launch" 2 "$tandem" generate "$dir/processes" --prompt ab --max-tokens 8 --temperature 0
grep -q ab "$dir/generate-2.log" || fail "generate on processes says nothing"
run bench "$launch" 3 "$tandem" bench all_gather --m 37 --n 5 --repeats 2 --json "$dir/bench.json"
grep -q '"transport":"processes"' <(tr -d ' ' < "$dir/bench.json") || fail "bench: $(cat "$dir/bench.json")"
