#!/usr/bin/env bash
# tune_test.sh TANDEM MPIRUN|- SOURCE_DIR [long]: the policy that `tandem tune` chooses for a model trained
# here keeps its budget when measured by `tandem eval`, and works in train and generate. long: also with
# another budget, and the same choice under mpirun.
set -eu
tandem=$1 mpirun=$2 source=$3 budgets=(0.1)
[ "${4:-}" != long ] || budgets=(0.02 0.1)
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
fail() {
  echo "$1" >&2
  shift
  cat "$@" >&2
  exit 1
}

"$tandem" train "$source/configs/tiny.toml" --set train.steps=30 --set data.val_fraction=0.3 --set model.layers=1 \
  --out "$dir/out" >"$dir/log" 2>&1 || fail 'training failed:' "$dir/log"
text=(--list "$dir/out/heldout.txt")
formats=(--formats 'lossless,int8,int4:g32,int2:g32')
everywhere() { echo "attention=$1,mlp=$1,embeddings=$1"; }
number() { sed -nE "s/^ *\"$1\": (.*[^,]),?$/\1/p" "$2" | head -1; }
tune() {  # BUDGET NAME
  "$tandem" tune "$dir/out" "${text[@]}" "${formats[@]}" --budget "$1" --json "$dir/$2.json" \
    >"$dir/$2" 2>"$dir/log" || fail "tune --budget $1:" "$dir/log"
  policy=$(number policy "$dir/$2.json" | tr -d '"')
}
score() { "$tandem" eval "$dir/out" "${text[@]}" --tp 2 --json - "$@" 2>/dev/null | sed -nE 's/^ "bits_per_byte": ([^,]*),/\1/p'; }
holds() { awk "BEGIN { exit !($1) }" || fail "$1 does not hold:" "$2"; }

# Single files, as in eval's JSON, are at other row offsets than concatenated, and a rank's local rows are not
# encoded: with a codec the two differ slightly.
plain=$(score)
for budget in "${budgets[@]}"; do
  tune $budget% chosen
  [ "$policy" != none ] || fail "nothing within $budget %:" "$dir/chosen"
  chosen=$(score --codec "$policy")
  rise=$(number rise "$dir/chosen.json")
  holds "$rise <= $budget / 100" "$dir/chosen"
  holds "$chosen / $plain - 1 <= $budget / 100 + 2e-4" "$dir/chosen"
  holds "($chosen / $plain - 1 - $rise)^2 < 4e-8" "$dir/chosen"
  holds "$(number bytes_per_token "$dir/chosen.json") < $(number uncompressed_bytes_per_token "$dir/chosen.json")" "$dir/chosen"
  grep -qF -- "--codec $policy" "$dir/chosen" || fail 'the policy is not printed:' "$dir/chosen"
done
[ "$(grep -cE '^\| (attention|mlp|embeddings) \| (lossless|int8|int4:g32|int2:g32) \|' "$dir/chosen")" = 12 ] ||
  fail 'not every site and format is in the table:' "$dir/chosen"
"$tandem" generate "$dir/out" --prompt x --max-tokens 3 --tp 2 --codec "$policy" >"$dir/log" 2>&1 ||
  fail "generate --codec $policy:" "$dir/log"
"$tandem" train "$source/configs/tiny.toml" --set train.steps=1 --tp 2 --codec "$policy" \
  --out "$dir/again" >"$dir/log" 2>&1 || fail "train --codec $policy:" "$dir/log"

tune 0% exact
[ "$policy" = "$(everywhere lossless)" ] || [ "$policy" = none ] || fail "$policy loses bits:" "$dir/exact"
! grep -q int "$dir/exact" || fail 'formats that lose bits are measured for nothing:' "$dir/exact"
tune 900% cheap
[ "$policy" = "$(everywhere int2:g32)" ] || fail "$policy is not the cheapest:" "$dir/cheap"

if [ "$mpirun" != - ] && [ "${4:-}" = long ]; then
  tune 0.5% threads
  "$mpirun" 2 "$tandem" tune "$dir/out" "${text[@]}" "${formats[@]}" --budget 0.5% \
    --json "$dir/mpi.json" >/dev/null 2>"$dir/log" || fail 'under mpirun:' "$dir/log"
  for key in policy rise; do
    [ "$(number $key "$dir/mpi.json")" = "$(number $key "$dir/threads.json")" ] ||
      fail "another $key under mpirun:" "$dir/mpi.json" "$dir/threads.json"
  done
fi

# A launcher may end all ranks when the first exits: each waits for the others to report.
printf '"$@" || code=$?\nsleep 1\nexit ${code:-0}\n' >"$dir/rank.sh"
refuses() {  # TEXT ARGUMENTS...: by every rank
  local text=$1 code=0
  shift
  "$tandem" tune "$dir/out" "$@" >/dev/null 2>"$dir/error" || code=$?
  [ "$code" = 2 ] && [ "$(wc -l <"$dir/error")" = 1 ] && grep -qF -- "$text" "$dir/error" ||
    fail "tune $*: exit $code, expected 2 with '$text':" "$dir/error"
  [ "$mpirun" != - ] || return 0
  "$mpirun" 2 sh "$dir/rank.sh" "$tandem" tune "$dir/out" "$@" >/dev/null 2>"$dir/error" &&
    fail "$* ended well" "$dir/error"
  for rank in 0 1; do
    grep -qF "tandem: rank $rank: error: $text" "$dir/error" ||
      fail "rank $rank does not say '$text':" "$dir/error"
  done
}
for budget in -1% x 0.5 nan%; do
  refuses "--budget $budget: expected a percentage of 0 or more" "${text[@]}" "--budget=$budget"
done
refuses "codec 'int9': expected one of" "${text[@]}" --budget 1% --formats int9
code=0
"$tandem" tune "$dir/out" "${text[@]}" --budget 1% --tp 1 2>"$dir/error" || code=$?
[ "$code" = 2 ] && grep -q 'tune with 1 rank' "$dir/error" || fail 'one rank is taken:' "$dir/error"
echo "every policy keeps its budget"
