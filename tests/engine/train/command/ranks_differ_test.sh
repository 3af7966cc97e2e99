#!/usr/bin/env bash
# ranks_differ_test.sh TANDEM MPIRUN CONFIG: two processes in separate folders, where one name means different
# text, models or locations: every rank names the difference, and nothing is written.
set -u
tandem=$1 mpirun=$2 config=$3
failures=0 seed=0
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TANDEM_THREADS=1 TANDEM_CACHE_DIR=$dir/cache TANDEM_DEADLINE_S=20 TANDEM_TUNE=0
small="--set train.steps=2 --set model.layers=1"

# differ 'PATTERN' [VARIABLE=VALUE] -- ARG... [-- ARG...]: rank 1, in b, gets the second arguments, or the
# same as rank 0 in a, and the variable.
differ() {
  local pattern=$1 text status first=() second=() setting=()
  shift
  while [ "$1" != -- ]; do setting+=("$1") && shift; done
  shift
  while [ $# -gt 0 ] && [ "$1" != -- ]; do first+=("$1") && shift; done
  second=("${@:2}")
  [ ${#second[@]} -gt 0 ] || second=("${first[@]}")
  {
    echo 'case ${OMPI_COMM_WORLD_RANK:?} in'
    echo "0) cd '$dir/a'; exec $(printf '%q ' "$tandem" "${first[@]}") ;;"
    echo "*) cd '$dir/b'; exec env $(printf '%q ' "${setting[@]}" "$tandem" "${second[@]}") ;;"
    echo 'esac'
  } >"$dir/rank.sh"
  text=$(timeout -k 1 60 "$mpirun" 2 bash "$dir/rank.sh" 2>&1 </dev/null)
  status=$?
  # The launcher ends the other rank when it sees the first one's exit: that rank may not report.
  if [ $status = 0 ] || [ $status -ge 124 ] ||
    ! grep -qE "rank [01]: error: (aborted by rank [01]: )?$pattern.*expected the same" <<<"$text" ||
    grep -E "rank [01]: error: " <<<"$text" | grep -qvE -e "$pattern.*expected the same"; then
    printf '%s\n' "${first[*]} -- ${second[*]}: exit $status" "  said: $text" \
      "  expected of each rank that speaks: $pattern" >&2
    failures=$((failures + 1))
  fi
}

for name in a b; do
  mkdir -p "$dir/$name/text"
  printf "text of $name %.0s" {1..200} >"$dir/$name/text/file"
  sed 's|\.\./include|text|' "$config" >"$dir/$name/job.toml"
  (cd "$dir/$name" && "$tandem" train job.toml --out model $small --set train.seed=$((++seed)) \
    2>/dev/null) || { echo "training in $name failed" >&2; exit 1; }
done
cp -r "$dir/a/text" "$dir/same"
touch "$dir/rank.sh"
before=$(cd "$dir" && find . -path ./cache -prune -o -type f -print | sort)
same=(--set "data.paths=$dir/same" $small --tp 2)

differ 'the training text: rank 0 has 1 files, 2000 bytes, hash .* rank 1 has 1 files, 2000 bytes, hash' \
  -- train job.toml --out "$dir/run" $small --tp 2
differ "--out: rank 0 means $dir/a/run, rank 1 means $dir/b/run:" -- train "$config" --out run "${same[@]}"
differ '--resume: rank 0 has no, rank 1 has yes:' \
  -- train "$config" --out "$dir/run" "${same[@]}" -- train "$config" --out "$dir/run" "${same[@]}" --resume
differ 'configuration: rank 0 has .* rank 1 has' \
  -- train "$config" --out "$dir/run" "${same[@]}" -- train "$config" --out "$dir/run" "${same[@]}" --set train.batch=4
one=(--set "data.paths=$dir/same" $small --dp 2)
differ 'configuration: rank 0 has .*gradients=int4.* rank 1 has .*gradients=int8' \
  -- train "$config" --out "$dir/run" "${one[@]}" --codec gradients=int4 \
  -- train "$config" --out "$dir/run" "${one[@]}" --codec gradients=int8
differ 'the model: rank 0 has .* rank 1 has' -- eval model --data "$config"
differ 'the text: rank 0 has 1 files, 2000 bytes, hash .* rank 1 has 1 files' -- eval "$dir/a/model" --data text
differ 'options: rank 0 has .* rank 1 has' \
  -- eval "$dir/a/model" --data "$config" -- eval "$dir/a/model" --data "$config" --stride 7
differ 'the model: rank 0 has .* rank 1 has' -- generate model --prompt x
differ 'options: rank 0 has .* rank 1 has' \
  -- generate "$dir/a/model" --prompt x -- generate "$dir/a/model" --prompt y
differ 'options: rank 0 has .* rank 1 has' \
  -- generate "$dir/a/model" --prompt x --stop a -- generate "$dir/a/model" --prompt x --stop b
differ 'options: rank 0 has .* rank 1 has' \
  -- generate "$dir/a/model" --prompt x --top-k 3 -- generate "$dir/a/model" --prompt x --top-k 4
differ 'environment: rank 0 has TANDEM_MPI_TRANSPORT=auto .* rank 1 has TANDEM_MPI_TRANSPORT=mpi' TANDEM_MPI_TRANSPORT=mpi \
  -- generate "$dir/a/model" --prompt x
[ "$before" = "$(cd "$dir" && find . -path ./cache -prune -o -type f -print | sort)" ] ||
  { echo "a refused run wrote something" >&2 && failures=$((failures + 1)); }

[ $failures = 0 ] && echo "every difference was named"
exit $((failures > 0))
