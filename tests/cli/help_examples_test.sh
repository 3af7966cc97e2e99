#!/usr/bin/env bash
# help_examples_test.sh TANDEM MPIRUN|- SOURCE_DIR: what the helps give as examples works, one after
# the other, in a folder that has this repository's configs and include. (`bench` alone is not tried:
# its examples take long.)
set -u
tandem=$1 mpirun=$2 source=$3
failures=0
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TANDEM_CACHE_DIR=$dir/cache
ln -s "$source/configs" "$source/include" "$dir"
cd "$dir" || exit 1

examples() { # of a help: without what stands beside them
  "$tandem" $1 --help | sed -nE 's/^  ((tandem|mpirun -n [0-9]+ tandem) .*)/\1/p' | sed -E 's/   *[^ ].*//'
}
count=0
for command in '' train eval tune generate trace; do
  while read -r line; do
    case $line in
      mpirun*)
        [ "$mpirun" != - ] || continue
        line="$mpirun $(sed -E 's/^mpirun -n ([0-9]+) tandem/\1 "$tandem"/' <<<"$line")"
        ;;
      *) line="\"\$tandem\" ${line#tandem}" ;;
    esac
    count=$((count + 1))
    eval "$line" >"$dir/log" 2>&1 </dev/null || {
      printf 'failed: %s\n%s\n' "$line" "$(cat "$dir/log")" >&2
      failures=$((failures + 1))
    }
  done < <(examples "$command")
done
[ $count -ge 15 ] || { echo "only $count examples found" >&2; failures=1; }
exit $((failures > 0))
