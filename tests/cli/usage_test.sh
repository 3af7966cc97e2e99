#!/usr/bin/env bash
# usage_test.sh TANDEM: wrong command lines end with one helpful line and the right exit code.
set -u
tandem=$1
failures=0

# expect CODE 'PATTERN' ARG...: exit CODE and one line on standard error that matches.
expect() {
  local code=$1 pattern=$2
  shift 2
  local text status
  text=$("$tandem" "$@" 2>&1 >/dev/null </dev/null)
  status=$?
  if [ "$status" != "$code" ] || [ "$(printf '%s\n' "$text" | wc -l)" != 1 ] ||
    ! [[ $text =~ $pattern ]]; then
    printf 'tandem %s\n  exit %s, expected %s\n  said: %s\n  expected: %s\n' \
      "$*" "$status" "$code" "$text" "$pattern" >&2
    failures=$((failures + 1))
  fi
}

# shows 'PATTERN' ARG...: exit 0 and standard output matches.
shows() {
  local pattern=$1
  shift
  local text
  if ! text=$("$tandem" "$@" 2>&1) || ! [[ $text =~ $pattern ]]; then
    printf 'tandem %s: expected %s in\n%s\n' "$*" "$pattern" "$text" >&2
    failures=$((failures + 1))
  fi
}

expect 2 'error: no command: expected one of .*info'
expect 2 "unknown command 'inof': did you mean info" inof
expect 2 "unknown command 'xyzzy': expected one of .*info" xyzzy
expect 2 'unknown option --hlep: did you mean --help' info --hlep
expect 2 'unknown option --frobnicate .see tandem info --help' info --frobnicate
expect 2 'unknown option --frob .see tandem --help' --frob
expect 2 'unknown option --hlep: did you mean --help' --hlep
expect 2 "unexpected argument 'extra' .see tandem info --help" info extra
TANDEM_DEADLINE_S=soon expect 2 'TANDEM_DEADLINE_S=soon: expected a number' info
TANDEM_DEADLINE_S=inf expect 2 'TANDEM_DEADLINE_S=inf: expected a number from 0.001 to 1' info
TANDEM_DEADLINE_S=1e10 expect 2 'TANDEM_DEADLINE_S=1e10: expected a number from 0.001 to 1' info
TANDEM_THREADS=2.7 expect 2 'TANDEM_THREADS=2.7: expected a whole number from 0 to 4096' info
TANDEM_THREADS=1000000 expect 2 'TANDEM_THREADS=1000000: expected a whole number from 0' info
TANDEM_DEVICE=tpu expect 2 'TANDEM_DEVICE=tpu: expected one of auto, cpu, gpu' info
CUDA_VISIBLE_DEVICES='' TANDEM_DEVICE=gpu expect 4 'device gpu: this build has no CUDA, or this machine no GPU' \
  bench train --layers 1 --seq 8
CUDA_VISIBLE_DEVICES='' expect 4 'device gpu: this build has no CUDA, or this machine no GPU' \
  train "$(dirname "$0")/../../configs/moe.toml" --device gpu --set train.dtype=f32 --out never
TANDEM_TUNE=yes expect 2 'TANDEM_TUNE=yes: expected one of 1, 0' info
TANDEM_DEADLINE=3 expect 0 'warning: TANDEM_DEADLINE is no variable .*did you mean TANDEM_DEADLINE_S' info
shows 'Exit codes' --help
# The same as words.
shows 'Exit codes' help
shows 'Layout:.* --tp N +Tensor' help train
shows '--microbatches' help plan schedule
shows '^tandem [0-9]+\.[0-9]+' version
expect 2 "unknown command 'trian': did you mean train" help trian
expect 2 "unexpected argument 'now'" version now
# Completion: offers COMMAND WORD... : what the shell offers for the last word.
offers() {
  bash -c 'source <("$0" completion bash) || exit 1
    COMP_WORDS=(tandem "$@") COMP_CWORD=$#; _tandem; echo "${COMPREPLY[@]}"' "$tandem" "$@"
}
[ "$(offers tr)" = 'train trace' ] || { echo "completion of tr: $(offers tr)" >&2; failures=1; }
[ "$(offers plan schedule --mi)" = --microbatches ] || { echo "completion of an option: $(offers plan schedule --mi)" >&2; failures=1; }
[ "$(offers train job.toml --re)" = --resume ] || { echo "completion after a file: $(offers train job.toml --re)" >&2; failures=1; }
script=$("$tandem" completion bash)
bash -n <<<"$script" || { echo "completion: no program of the shell" >&2; failures=1; }
[ "$("$tandem" completion bash | LC_ALL=C tr -d '[:print:]\n' | wc -c)" = 0 ] || { echo "completion: not printable" >&2; failures=1; }
[ "$("$tandem" completion bash)" = "$script" ] || { echo "completion: differs between runs" >&2; failures=1; }
expect 2 'shell: .*bash' completion csh
# Sections and values as one would write them, and the keys of one table, or of all.
shows 'Layout:.* --tp N +Tensor' train --help
shows 'tandem train --help TABLE' train --help
shows '^ +optimizer\.' train --help optimizer
shows 'model\..*trace\.' train --help keys
expect 2 '--help optimiser: expected one of .*optimizer' train --help optimiser
for command in train finetune completion eval generate bench report trace plan 'plan schedule' fit check-layout 'data check'; do
  # shellcheck disable=SC2086  # one word or two
  shows 'Example' $command --help
done
expect 2 '^tandem: error: --ranks: Value 5000 not in range .*4096' bench all_reduce --ranks 5000
expect 2 'all_reduce of m 1024 n 1024 k 1024 on 2000 ranks: its matrices need .* GB: expected' \
  bench all_reduce --ranks 2000
expect 2 'ranks 4000: what they send each other first needs .* GB: expected' \
  bench ag_gemm --ranks 4000 --m 4 --n 4 --k 4
expect 2 'gemm_rs of m 1099511627776 .* need .* GB: expected at most this machine' \
  bench gemm_rs --m 1099511627776 --n 1099511627776 --k 1099511627776
expect 2 '^tandem: error: --m: Value 0 not in range' bench ag_gemm --m 0
expect 2 '--cross excludes --causal' bench attention --cross --causal
expect 2 'schedule "zb-x": expected one of .*zb-v' bench pipeline --schedule zb-x
expect 3 '/nowhere/p.json: cannot be written: No such file' bench pipeline --json /nowhere/p.json
expect 2 '--dtype: f64 not in .f32,bf16,f16,e4m3.' bench ag_gemm --dtype f64
expect 2 'bench: dtype f16: expected f32 or bf16 on CPU ranks' bench ag_gemm --dtype f16
expect 2 '--dtype: f16 not in .f32,bf16.' eval x --data y --dtype f16
expect 3 '/nowhere/r.json: cannot be written: No such file' bench ag_gemm --json /nowhere/r.json
expect 3 '/nowhere/t.json: cannot be written: No such file' bench ag_gemm --timeline /nowhere/t.json
expect 2 "link '1GB': expected" bench ag_gemm --link 1GB
expect 2 'transport processes: not started by torchrun or srun.*expected torchrun --nproc_per_node' \
  bench ag_gemm --transport processes
"$tandem" info | grep -q 'mpi .*not in this build' ||
  expect 2 'transport mpi: not started by mpirun.*expected mpirun -n RANKS tandem bench' \
    bench ag_gemm --transport mpi
expect 2 "--timeline: 2 shapes: expected one" bench ag_gemm --m 64 128 --timeline t.json
expect 2 '--timeline and --json: both t.json: expected two files' \
  bench ag_gemm --timeline t.json --json t.json
expect 2 '--scaling row with --dtype bf16: expected --dtype e4m3' bench ag_gemm --dtype bf16 --scaling row
expect 2 '--scaling row with no --dtype: expected --dtype e4m3' bench ag_gemm --scaling row
expect 2 '--chunks 3 with all_reduce: expected an operator with a product' bench all_reduce --chunks 3
for option in '--model mixtral-8x7b' '--ep 2' '--tp 2' '--imbalance zipf' '--hidden-scale 2' --backward; do
  # shellcheck disable=SC2086  # one word or two
  expect 2 "${option%% *} with ag_gemm: expected moe or an operator of it" bench ag_gemm $option
done
expect 2 '--k 64 with all_reduce, which moves an m x n matrix: expected none' bench all_reduce --k 64
expect 2 '--chunks 4 with --transport nccl: expected 0' bench ag_gemm --transport nccl --chunks 4
expect 2 "moe: save 'all': expected sorted, rows or recompute" bench moe --backward --save all
expect 2 '--save rows with --transport nccl: expected sorted' \
  bench moe --transport nccl --backward --save rows
expect 2 '--m excludes --shapes' bench ag_gemm --shapes 8x8x8 --m 8
expect 3 'trace /dev/null: no trace: expected' trace /dev/null
expect 2 "^tandem: error: --rows: Value 0 not in range" trace t.json --rows 0
small=(--m 32 --n 32 --repeats 3)
expected() { # WHAT TEXT
  printf 'expected %s in\n%s\n' "$1" "$2" >&2
  failures=$((failures + 1))
}
shows 'explain says.*MxNxK +GEMM +wire +limit +serial +overlap +TFLOP/s +E +error +chunks' \
  bench gemm_rs "${small[@]}" --k 32
# explains OP ARG...: every column of the table is explained in the lines before it.
explains() {
  local text
  text=$("$tandem" bench "$@" --explain)
  for column in $(grep -E '(algbw +error|wire +error|error +chunks)' <<<"$text"); do
    grep -qE "^  $column +[^ ]" <<<"$text" || expected "bench $* --explain: the column $column" "$text"
  done
  [ "$(grep -cE '^  error ' <<<"$text")" = 1 ] || expected "bench $* --explain: columns" "$text"
}
explains gemm_rs "${small[@]}" --k 32
explains gemm_rs "${small[@]}" --k 32 --codec int8
explains all_gather "${small[@]}"
explains all_reduce "${small[@]}" --codec int8
explains prefill --layers 1 --m 32 --n 32 --k 128 --repeats 2
explains moe --model qwen2-moe-2.7b --tokens 32 --hidden-scale 32 --repeats 2
text=$("$tandem" bench all_gather --bytes 1K:16K --repeats 2)
[ "$(grep -cE 'direct +algbw' <<<"$text")" = 1 ] && [[ $text != *GEMM* ]] ||
  expected 'one head without a product' "$text"
[ "$(grep -oE '^ +(1|4|16)K ' <<<"$text" | tr -d ' \n')" = 1K4K16K ] ||
  expected 'rows of 1K, 4K and 16K' "$text"
text=$("$tandem" bench ag_gemm --shapes 16384x128x128 1x2x3 --repeats 2)
[ -z "$(grep -E '.{101}' <<<"$text")" ] || expected 'at most 100 columns' "$text"
text=$("$tandem" bench gemm_ar --shapes 32x32x32 16x16x16 --repeats 2 --csv -)
[ "$(wc -l <<<"$text")" = 3 ] && [[ $text == op,transport,* ]] &&
  [ "$(sed -e 's/"[^"]*"//g' -e 's/[^,]//g' <<<"$text" | sort -u | wc -l)" = 1 ] || expected 'a head and two lines of CSV' "$text"
expect 2 '--bytes 16K:1: expected FIRST:LAST' bench all_reduce --bytes 16K:1
expect 2 '--bytes 1K:4K:x1: expected FIRST:LAST' bench all_reduce --bytes 1K:4K:x1
expect 2 '--bytes 2T: expected FIRST:LAST' bench all_reduce --bytes 2T
expect 2 '--bytes: 6 in f32: expected a multiple of 4' bench all_reduce --bytes 6
expect 2 '--bytes with ag_gemm: expected a collective' bench ag_gemm --bytes 16K
expect 2 '--no-library with ag_gemm: expected a collective' bench ag_gemm --no-library
expect 2 '--json - and --csv -: expected one of them' bench all_reduce --json - --csv -
expect 2 '--csv and --json: both r.txt: expected two files' bench all_reduce --json r.txt --csv r.txt
expect 3 '/nowhere/r.csv: cannot be written: No such file' bench ag_gemm --csv /nowhere/r.csv
# Arguments of the wrong kind for a command.
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
expect 3 "trace $folder: a folder: expected the trace.json of a run" trace "$folder"
touch "$folder/trace.json" "$folder/metrics.jsonl"
expect 3 "trace $folder: a folder: expected a file: tandem trace $folder/trace.json" trace "$folder"
expect 3 "report $folder/metrics.jsonl: a file: expected a folder: tandem report $folder" \
  report "$folder/metrics.jsonl"
# Files and folders that are not there: one exit code in all commands.
expect 3 'report /nowhere: no such folder: expected the folder that tandem train --out wrote' report /nowhere
expect 3 'report /nowhere: no such folder' report /nowhere --complete
expect 3 'report /nowhere: no such folder' report /nowhere --tensorboard
expect 3 'trace /nowhere/t.json: no such file: expected the trace.json of a run' trace /nowhere/t.json
expect 3 '/nowhere/ranks: no records' doctor /nowhere
expect 3 '/nowhere: .*No such file' doctor --hosts /nowhere
expect 3 '/nowhere: .*No such file' launch --hosts /nowhere -n 1 -- true
expect 3 '/nowhere: no config.json' serve /nowhere --port 0
expect 3 '/nowhere: no config.json' generate /nowhere
expect 3 '/nowhere: no config.json' eval /nowhere
expect 3 '/nowhere/ledger.jsonl: .*No such file' data check /nowhere
expect 3 '/nowhere: .*No such file' data verify /nowhere
expect 3 '/nowhere: .*No such file' tokenize /nowhere
expect 3 '/nowhere: .*No such file' check-layout /nowhere
expect 3 '/nowhere: .*No such file' train /nowhere --out "$folder/out"
expect 3 '/nowhere: .*No such file' plan /nowhere --gpus 8 --hardware /nowhere
expect 3 '/nowhere: .*No such file' plan --fit /nowhere
printf '[data]\npaths = ["%s"]\n' "$folder" >"$folder/job.toml"
# One or several settings per flag, before or after the job file; each of them is checked.
for settings in "--set model.layers=1 --set train.batch=3" "--set model.layers=1 train.batch=3" \
  "--set=model.layers=1 train.batch=3"; do
  # shellcheck disable=SC2086  # words
  expect 2 'train.batch is 3: expected a multiple of parallel.dp = 2' train $settings "$folder/job.toml" --dp 2 --out x
  # shellcheck disable=SC2086
  expect 2 'train.batch is 3: expected a multiple of parallel.dp = 2' train "$folder/job.toml" --dp 2 --out x $settings
done
expect 2 "set train.bacth=3: unknown key .*did you mean 'train.batch'" \
  train "$folder/job.toml" --out x --set model.layers=1 train.bacth=3
expect 2 "unexpected argument 'extra'" train "$folder/job.toml" --out x --set model.layers=1 extra
expect 2 'dir is missing: Folder that tandem train wrote' eval
expect 2 'config is missing: Job file' train
expect 2 'FILE is missing: trace.json of' trace
expect 2 'op is missing: Operator or collective to time' bench
expect 2 '^tandem: error: tandem plan: expected one of schedule, placements, a model, a job file or --fit after it .see tandem plan --help' plan
expect 2 '--gpus is missing: tandem plan shedule expects --gpus and --hardware' plan shedule
expect 2 '--pp is missing: Pipeline ranks .see tandem plan schedule --help' plan schedule
long=$(printf 'x%.0s' {1..100000})
expect 2 '^.{1,400}$' "$long"
expect 2 '^.{1,400}$' info "--$long"
expect 2 '^.{1,400}$' info "$long"
expect 2 '^.{1,2200}$' bench ag_gemm --m "$long"
expect 2 '^.{1,500}$' bench ag_gemm --link "$long"
expect 2 "link '1e-300B/s,1us': a rate of 1e-300 B/s: expected 1 to 1e.15 B/s" \
  bench ag_gemm --link 1e-300B/s,1us
expect 2 "link '1GB/s,1e300s': a latency of 1e.300 s: expected 0 to 3600 s" \
  bench ag_gemm --link 1GB/s,1e300s
for command in '' train finetune completion eval generate serve bench 'bench train' 'bench generate' info report doctor tune trace plan \
  'plan schedule' check-layout launch data 'data check' 'data index' tokenize; do
  # shellcheck disable=SC2086  # none, one word or two
  wide=$("$tandem" $command --help | grep -E '.{101}')
  if noise=$("$tandem" $command --help | grep -E 'REQUIRED|Excludes:|Needs:|(TEXT|INT|FLOAT):'); then
    printf 'tandem %s --help: of CLI11:\n%s\n' "$command" "$noise" >&2
    failures=$((failures + 1))
  fi
  if [ -n "$wide" ]; then
    printf 'tandem %s --help: wider than 100 columns:\n%s\n' "$command" "$wide" >&2
    failures=$((failures + 1))
  fi
done
export TANDEM_CACHE_DIR=/somewhere
shows 'options +.*(x86-64|aarch64)' info
shows 'TANDEM_CACHE_DIR +/somewhere .*\(set\)' info
shows '^tandem [0-9]+\.[0-9]+' --version
[ "$failures" = 0 ]
