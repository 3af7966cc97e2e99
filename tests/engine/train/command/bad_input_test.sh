#!/usr/bin/env bash
# bad_input_test.sh TANDEM MPIRUN|- CONFIG: wrong input to train and eval ends with one line that gives the
# name, the value and the expectation, the right exit code on every rank, no hang, and nothing overwritten.
set -u
tandem=$1 mpirun=$2 config=$3
failures=0
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TANDEM_THREADS=1 TANDEM_CACHE_DIR=$dir/cache TANDEM_DEADLINE_S=20

complain() {
  printf '%s\n' "$@" >&2
  failures=$((failures + 1))
}

# expect CODE 'PATTERN' ARG...: exit CODE within 30 s and one line of error that matches.
expect() {
  local code=$1 pattern=$2 text status errors
  shift 2
  text=$(timeout -k 1 30 "$tandem" "$@" 2>&1 >/dev/null </dev/null)
  status=$?
  errors=$(grep -c 'error:' <<<"$text")
  if [ "$status" != "$code" ] || [ "$errors" != 1 ] || ! [[ $text =~ $pattern ]]; then
    complain "tandem $*" "  exit $status, expected $code" "  said: $text" "  expected: $pattern"
  fi
}

# expect_mpi 'PATTERN' ARG...: under two processes each prints a matching line, and mpirun fails.
expect_mpi() {
  [ "$mpirun" != - ] || return 0
  local pattern=$1 text status
  shift
  text=$(timeout -k 1 60 "$mpirun" 2 "$tandem" "$@" 2>&1 </dev/null)
  status=$?
  # The launcher ends the other rank when it sees the first one's exit: that rank may not report.
  if [ $status = 0 ] || [ $status -ge 124 ] || ! grep -qE "rank [01]: error: .*$pattern" <<<"$text" ||
    grep -E "rank [01]: error: " <<<"$text" | grep -qvE -e "$pattern"; then
    complain "mpirun 2 tandem $*" "  exit $status" "  said: $text" "  expected of each rank that speaks: $pattern"
  fi
}

job() { printf '%s\n' "$@" >"$dir/job.toml"; }
small=(--set train.steps=2 --set model.layers=1)

job '[train]' 'stesp = 3'
expect 2 'job.toml:2: unknown key .train.stesp.: did you mean .train.steps' train "$dir/job.toml" --out "$dir/x"
job '[train]' 'steps = "many"'
expect 2 'job.toml:2: train.steps is "many": expected an integer' train "$dir/job.toml" --out "$dir/x"
job '[train' 'steps = 3'
expect 2 'job.toml:1: not valid TOML' train "$dir/job.toml" --out "$dir/x"
expect 3 'none.toml: cannot open: No such file' train "$dir/none.toml" --out "$dir/x"
expect 2 'unknown key .optimizer.lrr.' train "$config" --out "$dir/x" --set optimizer.lrr=1
expect 2 'heads' train "$config" --out "$dir/x" --tp 3
expect 2 'tp' train "$config" --out "$dir/x" --tp 0
expect 2 'ranks' train "$config" --out "$dir/x" --ranks 0
expect 2 'ranks 3: expected tp x dp x pp = 2 x 1' train "$config" --out "$dir/x" --tp 2 --ranks 3
expect 2 'ranks 3: expected tp x cp x dp x pp = 1 x 2 x 1 x 1 = 2' train "$config" --out "$dir/x" --cp 2 --ranks 3
expect 2 'parallel.cp is 2 with sync.learners = 2: expected cp = 1' train "$config" --out "$dir/x" --cp 2 --dp 2 \
  --set sync.method=local --set sync.learners=2 --set sync.every=2
expect 2 'train.batch is 8: expected a multiple of parallel.dp = 3' train "$config" --out "$dir/x" --dp 3
expect 2 'sync.learners is 3: expected a divisor of parallel.dp = 4' train "$config" --out "$dir/x" --dp 4 \
  --set sync.method=local --set sync.learners=3 --set sync.every=2
expect 2 'sync.topk is 0: expected a share above 0' train "$config" --out "$dir/x" --dp 4 \
  --set sync.method=local --set sync.learners=4 --set sync.every=2 --set sync.topk=0
expect 3 'nowhere: no such file or folder' train "$config" --out "$dir/x" --set "data.paths=$dir/nowhere"
expect 3 'matches no file' train "$config" --out "$dir/x" --set "data.paths=$dir/*.none"
mkdir "$dir/empty" && : >"$dir/empty/file"
expect 2 'none of text; left out 1 empty file' train "$config" --out "$dir/x" --set "data.paths=$dir/empty"
if [ "$(id -u)" != 0 ]; then
  echo text >"$dir/secret" && chmod 0 "$dir/secret"
  expect 3 'secret: cannot open: Permission denied' train "$config" --out "$dir/x" --set "data.paths=$dir/secret"
fi
expect 3 '/dev/null: expected a file or folder, found a device' train "$config" --out "$dir/x" --set data.paths=/dev/null
printf '\1\0\2\0\377\377\3\0' >"$dir/x.bin"
expect 3 'x.bin: token 2 is 65535: expected 0 to 256, below model.vocab' train "$config" --out "$dir/x" --set "data.paths=$dir/x.bin"
expect_mpi 'x.bin: token 2 is 65535: expected 0 to 256, below model.vocab' train "$config" --dp 2 --out "$dir/x" --set "data.paths=$dir/x.bin"
printf 'MMIDIDX\0\0\1' >"$dir/x.idx"
expect 3 'x.idx: damaged index: ends in its header' train "$config" --out "$dir/x" --set "data.paths=$dir/x.bin"
expect_mpi 'x.idx: damaged index: ends in its header' train "$config" --dp 2 --out "$dir/x" --set "data.paths=$dir/x.bin"
expect 2 'data.paths: "b" has no weight' train "$config" --out "$dir/x" --set 'data.paths=["0.5 a", "b"]'
expect 2 'data.paths: "0 a": expected a weight above 0 and a path' train "$config" --out "$dir/x" --set 'data.paths=["0 a"]'
expect 3 'a: no such file or folder' train "$config" --out "$dir/x" --set 'data.paths=["0.5 a", "1 b"]'
expect 2 'data.val_fraction is 0.1: expected 0 where data.val_paths is given' train "$config" --out "$dir/x" --set data.val_fraction=0.1 data.val_paths=text
expect 2 'data.val_paths holds tokens, data.paths text: expected one format' train "$config" --out "$dir/x" --set "data.val_paths=$dir/x.bin"
rm "$dir/x.idx"
expect 2 'link' train "$config" --out "$dir/x" --set parallel.link=fast
expect 2 'weights, gradients and moments need .* GB: expected at most this machine' train "$config" --out "$dir/x" --set model.hidden=1048576
[ ! -e "$dir/x" ] || complain "a refused run left $dir/x"
echo file >"$dir/file"
expect 3 'file' train "$config" --out "$dir/file/x"
nobody=(setpriv --reuid 65534 --regid 65534 --clear-groups)
mkdir -m 700 "$dir/closed" && chmod 711 "$dir"
if "${nobody[@]}" test -x "$tandem" -a -r "$config" 2>/dev/null; then
  text=$("${nobody[@]}" "$tandem" train "$config" --out "$dir/closed/x" 2>&1)
  status=$?
  [ $status = 3 ] && [[ $text =~ closed/x:.*Permission\ denied ]] || complain "closed folder: exit $status: $text"
fi
expect 3 'no config.json' eval "$dir/empty" --data "$config"

timeout 60 "$tandem" train "$config" --out "$dir/run" "${small[@]}" 2>/dev/null || complain "training failed"
before=$(cd "$dir/run" && find . -type f -exec sha256sum {} + | sort)
expect 2 'run: already holds a run .checkpoints.: pass --resume' train "$config" --out "$dir/run" "${small[@]}"
expect 2 'model.hidden is 64 in this checkpoint: expected 32' train "$config" --out "$dir/run" --resume "${small[@]}" --set model.hidden=32
expect 2 'step-0+2: model.hidden is 64 in this checkpoint: expected 32; model.norm_eps is 1e-05 in this checkpoint: expected 1e-06; model.tie_word_embeddings is true in this checkpoint: expected false$' \
  train "$config" --out "$dir/run" --resume "${small[@]}" --set model.hidden=32 model.norm_eps=1e-6 model.tie_word_embeddings=false
expect 2 'hash of the training text' train "$config" --out "$dir/run" --resume "${small[@]}" --set "data.paths=$config"
expect 2 'train.seq is 64 in this checkpoint: expected 32' train "$config" --out "$dir/run" --resume "${small[@]}" --set train.seq=32
expect 3 'missing.txt: no such file' eval "$dir/run" --data "$dir/missing.txt"
expect 2 'expected --data' eval "$dir/run"
expect 2 'heldout.txt: names no files: expected a path per line' eval "$dir/run" --list "$dir/run/heldout.txt"
expect 3 'nowhere/scores.json: cannot be written' eval "$dir/run" --data "$config" --json "$dir/nowhere/scores.json"
expect 2 'none of text; left out 1 empty file' eval "$dir/run" --data "$dir/empty"
expect 2 'stride 1000: expected' eval "$dir/run" --data "$config" --stride 1000
expect 2 "init $dir/run: expected no --resume" train "$config" --out "$dir/run" --resume --init "$dir/run"
expect 2 "init $dir/run: model.hidden is 64 in this model: expected 32; model.ffn is 176 in this model: expected 64$" \
  train "$config" --out "$dir/x" --init "$dir/run" "${small[@]}" --set model.hidden=32 model.ffn=64
expect 3 'empty: no config.json' train "$config" --out "$dir/x" --init "$dir/empty"
expect_mpi 'model.ffn is 176 in this model: expected 64' train "$config" --tp 2 --out "$dir/x" --init "$dir/run" "${small[@]}" --set model.ffn=64
[ ! -e "$dir/x" ] || complain "a refused --init left $dir/x"
expect_mpi 'already holds a run' train "$config" --tp 2 --out "$dir/run" "${small[@]}"
expect_mpi 'ranks [14]: the world has 2|world of 2 ranks: expected' train "$config" --out "$dir/y" "${small[@]}"
expect_mpi 'ranks [14]: the world has 2|world of 2 ranks: expected' train "$config" --tp 4 --out "$dir/y" "${small[@]}"
expect_mpi 'nowhere: no such file' train "$config" --tp 2 --out "$dir/y" --set "data.paths=$dir/nowhere"
expect_mpi 'heads' eval "$dir/run" --data "$config" --tp 3
expect_mpi 'tp 1: the launcher started 2 ranks: expected 2 or none given' eval "$dir/run" --data "$config" --tp 1
[ ! -e "$dir/y" ] || complain "a refused run left $dir/y"
[ "$before" = "$(cd "$dir/run" && find . -type f -exec sha256sum {} + | sort)" ] || complain "a refused run changed $dir/run"

# JSON nested deeper than any stack, in every file that is read.
mkdir -p "$dir/deep" "$dir/cache"
head -c 200000 /dev/zero | tr '\0' '[' | tee "$dir/deep/metrics.jsonl" "$dir/deep/config.json" >"$dir/cache/tuner.json"
expect 3 'deep/metrics.jsonl:1: not JSON, or nested more than 100 deep' report "$dir/deep"
expect 3 'deep/metrics.jsonl: no trace' trace "$dir/deep/metrics.jsonl"
expect 2 'deep/config.json: not JSON, or nested more than 100 deep' eval "$dir/deep" --data "$config"
timeout 60 "$tandem" train "$config" --out "$dir/tuned" "${small[@]}" 2>/dev/null || complain "tuner.json ended the run"

# With any memory limit, an error reports it: no signal ends the run.
for limit in {100000..300000..20000} {134000..138000..500}; do
  text=$(ulimit -v $limit && timeout -k 1 60 "$tandem" train "$config" --tp 2 --out "$dir/limit-$limit" "${small[@]}" 2>&1)
  status=$?
  [ $status = 0 ] || [ $status = 127 ] || { [[ $status =~ ^[34]$ && $text =~ error:.*(memory|"start only") ]]; } ||
    complain "ulimit -v $limit: exit $status: $text"
done

printf 'x' | dd of="$dir/run/final/model.safetensors" bs=1 seek=40000 conv=notrunc 2>/dev/null
expect 3 'model.safetensors: tensor .*: content hash' eval "$dir/run" --data "$config"
for file in "$dir"/run/checkpoints/*/model.safetensors; do truncate -s -5 "$file"; done
expect 3 'no valid checkpoint to resume from: .*model.safetensors: tensor' train "$config" --out "$dir/run" --resume "${small[@]}"

[ $failures = 0 ] && echo "every wrong input was refused"
exit $((failures > 0))
