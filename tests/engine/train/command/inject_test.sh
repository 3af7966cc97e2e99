#!/usr/bin/env bash
# inject_test.sh TANDEM CONFIG: faults of processes, files and messages that a run is started with, and what
# notices them.
set -eu
tandem=$1 config=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TANDEM_THREADS=1 TANDEM_CACHE_DIR=$dir/cache TANDEM_TUNE=0 TANDEM_MPI_SHM=0
fail() { echo "$1" >&2; exit 1; }
has() { grep -q -e "$1" "$2" || fail "$2: expected '$1': $(cat "$2")"; }

# run NAME FAULTS [OPTION...]: two processes with dp 2; their exit status is in $status.
run() {
  local name=$1
  printf '%s' "$2" > "$dir/$name.toml"
  shift 2
  status=0
  timeout 60 "$tandem" launch -n 2 -- "$tandem" train "$config" --dp 2 --out "$dir/$name" \
    --inject "$dir/$name.toml" --set train.steps=4 train.dtype=f32 train.seq=32 "$@" \
    > "$dir/$name.log" 2>&1 || status=$?
}

run plain ''
[ $status = 0 ] || fail "$(cat "$dir/plain.log")"
run kill $'[[fault]]\nstep = 3\nrank = 1\nkind = "kill"\n'
[ $status != 0 ] || fail "the run ended well without rank 1"
has '"step":3,"rank":1,"kind":"kill"' "$dir/kill/injected.jsonl"

# Each kill without its span is reported.
run missed $'[[fault]]\nstep = 2\nrank = 1\nkind = "kill"\nspan = "no_such_span"\nphase = "backward"\n[[fault]]\nstep = 3\nrank = 1\nkind = "kill"\nspan = "nor_this"\n'
[ $status = 2 ] || fail "exit status $status: $(cat "$dir/missed.log")"
has 'kill in step 2 of rank 1: no span "no_such_span" in phase backward has ended since: expected one' "$dir/missed.log"
has 'kill in step 3 of rank 1: no span "nor_this" has ended since: expected one' "$dir/missed.log"
[ -d "$dir/missed/checkpoints/step-00000004" ] || fail "the last step was not saved"

run slow $'[[fault]]\nstep = 2\nrank = 0\nkind = "slow"\npercent = 50\n[[fault]]\nstep = 3\nrank = 1\nkind = "pause"\nseconds = 0.02\n'
[ $status = 0 ] || fail "$(cat "$dir/slow.log")"
has '"kind":"slow".*"percent":50' "$dir/slow/injected.jsonl"
has '"kind":"pause"' "$dir/slow/injected.jsonl"
cmp "$dir/plain/final/model.safetensors" "$dir/slow/final/model.safetensors" || fail "a slow rank changed bits"

message=$'[[fault]]\nstep = 3\nrank = 1\nkind = "flip_message"\nbit = 20\n'
TANDEM_CHECK_MESSAGES=1 run checked "$message"
[ $status = 6 ] || fail "exit status $status: $(cat "$dir/checked.log")"
has 'the message of [0-9]* bytes from rank 1 to rank 0 is corrupt' "$dir/checked.log"
TANDEM_CHECK_MESSAGES=0 run unchecked "$message"
[ $status = 0 ] || fail "$(cat "$dir/unchecked.log")"
if cmp -s "$dir/plain/final/model.safetensors" "$dir/unchecked/final/model.safetensors"; then
  fail "the flipped message had no effect"
fi

run file $'[[fault]]\nstep = 4\nrank = 0\nkind = "flip_checkpoint"\n' checkpoint.every=2
[ $status = 0 ] || fail "$(cat "$dir/file.log")"
has '"kind":"flip_checkpoint".*"file":' "$dir/file/injected.jsonl"
"$tandem" train "$config" --dp 2 --out "$dir/file" --resume --set train.steps=6 train.dtype=f32 \
  train.seq=32 > "$dir/resumed.log" 2>&1 || fail "$(cat "$dir/resumed.log")"
has 'resuming from .*step-00000002' "$dir/resumed.log"

run wrong $'[[fault]]\nstep = 3\nrank = 2\nkind = "kill"\n'
[ $status = 2 ] || fail "exit status $status"
has 'wrong.toml:3: fault.rank is 2: expected an integer from 0 to 1' "$dir/wrong.log"
