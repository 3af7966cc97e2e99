#!/usr/bin/env bash
# fit_test.sh TANDEM MPIRUN|-: `tandem fit` prints the same results at any number of ranks, ends with 1 where --tol
# is not reached, and refuses wrong input with one line before anything runs.
set -u
tandem=$1 mpirun=$2
. "$(dirname "$0")/expect.sh"

# Two classes of rows one after the other, so that clients differ.
awk 'BEGIN { srand(7); for (r = 0; r < 120; ++r) { y = r < 60 ? 1 : -1; printf "%d", y
  for (k = 1 + r % 3; k <= 20; k += 1 + int(3 * rand())) printf " %d:%.4f", k, rand() - .5 + y * .1 * (k % 4)
  print "" } }' >rows.svm

# results FILE: all numbers but those that depend on the run.
results() {
  python3 - "$1" <<'END'
import json, sys
def strip(value):
    if isinstance(value, list):
        return [strip(each) for each in value]
    if isinstance(value, dict):
        return {k: strip(v) for k, v in value.items() if k not in ("seconds", "ranks")}
    return value
runs = strip(json.load(open(sys.argv[1])))
for run in runs:
    assert run["history"][0]["distance"] == 1 and run["history"][-1]["distance"] == run["distance"], run
print(json.dumps(runs))
END
}

methods=$("$tandem" fit --help | sed -nE 's/^  ([a-z-]+) {3,}[a-z].*/\1/p' | grep -v '^-' | paste -sd,)
case $methods in gd,scaffnew,*) ;; *) fail "methods in the help: $methods" ;; esac
solve=(fit rows.svm --l2 auto:kappa=30 --clients 8 --method "$methods" --max-rounds 60 --tol 1e-12)
for ranks in 1 2 4; do
  expect 1 'reached distance .* in .* rounds: expected 1e-12 .--tol.' "${solve[@]}" --ranks $ranks --json "$ranks.json"
  results $ranks.json >$ranks.txt || fail "results of $ranks ranks"
  cmp 1.txt $ranks.txt || fail "$ranks ranks differ from one"
done
[ -s 1.txt ] || fail "no results"
if [ "$mpirun" != - ]; then
  "$mpirun" 3 "$tandem" "${solve[@]}" --json mpi.json >mpi.log 2>&1
  cp rows.svm rows0.svm
  sed 1d rows.svm >rows1.svm
  "$mpirun" 2 sh -c '"$0" fit rows$OMPI_COMM_WORLD_RANK.svm --l2 1' "$tandem" >differ.log 2>&1 && fail "different files"
  grep -q 'digest of the rows.*rank 1' differ.log || fail "different files: $(cat differ.log)"
  printf '1 1:1 2:1\n-1 1:2\n1 2:1\n' >rows0.svm # the same numbers in the same order, in other rows
  printf '1 1:1\n-1 2:1\n1 1:2 2:1\n' >rows1.svm
  "$mpirun" 2 sh -c '"$0" fit rows$OMPI_COMM_WORLD_RANK.svm --l2 1 --clients 2' "$tandem" >differ.log 2>&1 && fail "different rows"
  grep -q 'digest of the rows.*rank 1' differ.log || fail "different rows: $(cat differ.log)"
  for option in '--seed ' '--max-rounds 10' '--p 0.' '--step '; do
    "$mpirun" 2 sh -c '"$0" fit rows.svm --l2 1 $1$((1 + OMPI_COMM_WORLD_RANK))' "$tandem" "$option" >differ.log 2>&1 && fail "different $option"
    grep -q "options.*rank 1.*${option%% *}" differ.log || fail "different $option: $(cat differ.log)"
  done
  "$mpirun" 3 "$tandem" fit rows.svm --l2 0.1 --method api-bcd --tokens 4 --async --max-rounds 20000 >async.log 2>&1 ||
    fail "tokens between processes: $(cat async.log)"
  results mpi.json | cmp 1.txt || fail "three processes differ from one rank: $(cat mpi.log)"
fi

"$tandem" fit rows.svm --l2 0.1 --method gd --tol 1e-8 --test rows.svm --json - 2>log |
  python3 -c 'import json, sys; run = json.load(sys.stdin)
assert run["distance"] <= 1e-8 and run["method"] == "gd" and run["nonzeros"] == 20 and .5 < run["accuracy"] == run["optimal_accuracy"], run' ||
  fail "JSON of one method: $(cat log)"
expect 0 '\| gossip \(control\) \|' fit rows.svm --l2 0.1 --method gossip --codec int4:g16 --control --out page
grep -q '<canvas id="bytes"' page/fit.html && grep -q '"method":"gossip"' page/fit.html || fail "page of --out"
! grep -qE '(src|href)="(https?:)?//' page/fit.html || fail "the page loads from the network"
expect 0 '\| scaffnew \| [0-9]+ \|' fit rows.svm --l2 0.1
expect 0 'on 2 ranks, emulated 1GB/s,10us' fit rows.svm --l2 0.1 --ranks 2 --link 1GB/s,10us
TANDEM_DEADLINE_S=.1 expect 5 'rank . waited 0.1 s for rank ' fit rows.svm --l2 0.1 --ranks 2 --link 1GB/s,1s

expect 0 '\| api-bcd \| [0-9]+ \|' fit rows.svm --l2 0.1 --method api-bcd --tokens 4 --async --ranks 3 --max-rounds 20000

# A killed process ends the others, which name its rank.
cat >die.sh <<'END'
[ "$RANK" != 1 ] || (sleep 1; kill -9 $$) &
exec "$@"
END
endless=(fit rows.svm --l2 1e-4 --method api-bcd --tokens 3 --tol 0 --max-rounds 100000000)
for async in '' --async; do
  "$tandem" launch -n 3 -- sh die.sh "$tandem" "${endless[@]}" $async >lost.log 2>&1 && fail "a lost process is a success"
  grep -qE 'rank [02]: error: .*rank 1' lost.log || fail "the other ranks do not name the lost one: $(cat lost.log)"
done

printf '1 1:2\n2 1:3\n3 1:4\n' >three.svm
printf '1 2:2 1:3\n-1 1:1\n' >order.svm
: >empty.svm
expect 3 'none.svm: .*No such file' fit none.svm --l2 1
expect 3 'empty.svm: no rows' fit empty.svm --l2 1
expect 3 'order.svm:1: "1:3": expected an index above 2' fit order.svm --l2 1
expect 3 'log:1: .*: expected a finite number as a label' fit log --l2 1
expect 2 'three.svm: more than two values of labels .*expected two classes' fit three.svm --l2 1 --clients 2
expect 2 'l1 and --l2 are 0' fit rows.svm
expect 2 '--clients 200: rows.svm has 120 rows' fit rows.svm --l2 1 --clients 200
expect 2 '--clients 2: 4 ranks: expected a client for each' fit rows.svm --l2 1 --clients 2 --ranks 4
expect 2 '--l2 auto:kappa=1: expected' fit rows.svm --l2 auto:kappa=1
expect 2 '--method sgd: expected one of gd, scaffnew' fit rows.svm --l2 1 --method sgd
expect 2 '--sparsity: scaffnew does not read it, but --p' fit rows.svm --l2 1 --method scaffnew --sparsity 2
expect 2 '--cohort 17: 16 clients: expected 2 to 16' fit rows.svm --l2 1 --method tamuna --cohort 17
expect 2 '--sparsity 5: a cohort of 4 clients: expected 2 to 4' fit rows.svm --l2 1 --method tamuna --cohort 4 --sparsity 5
printf '0 1\n2 3\n' >two.graph
expect 2 'two.graph: no path from client 0 to client 2' fit rows.svm --l2 1 --method gossip --clients 4 --graph two.graph
expect 2 '--graph torus: 10 clients' fit rows.svm --l2 1 --method gossip --clients 10 --graph torus
expect 3 'star: ' fit rows.svm --l2 1 --method gossip --graph star
expect 2 '--codec mxfp4: expected none or int8 to int2' fit rows.svm --l2 1 --method gossip --codec mxfp4
expect 2 '--tokens 17: 16 clients' fit rows.svm --l2 1 --method api-bcd --tokens 17
expect 2 '--async: gd does not read it, but --step' fit rows.svm --l2 1 --method gd --async
expect 2 '--control: gd has none' fit rows.svm --l2 1 --method gd --control
expect 2 '--l1 0.1: scaffnew takes --l2 only' fit rows.svm --l1 .1 --method scaffnew
for number in '--l1 nan' '--tol nan' '--step nan' '--l1 inf'; do
  expect 2 "${number% *}:? " fit rows.svm --l2 1 --method gd $number
done
# Options are refused before the data are read, whatever the first method is.
while read -r wrong; do
  expect 2 "error: ${wrong%% *} " fit none.svm --l2 1 --method gd,scaffnew,tamuna,gossip,api-bcd $wrong
done <<'END'
--cohort 17
--sparsity 5
--p 2
--codec mxfp4
--tokens 17
--tau 0
--graph torus --clients 10
--clients 1
END
expect 2 '--clients 1: control variates' fit rows.svm --l2 1 --clients 1
expect 3 'none.svm: ' fit rows.svm --test none.svm
sed -n '/^1 /p' rows.svm >one.svm
sed 's/^1 /3 /' rows.svm >other.svm
expect 2 'other.svm: label 3: expected a class, -1 or 1' fit rows.svm --l2 1 --test other.svm
expect 0 'scaffnew' fit rows.svm --l2 1 --test one.svm
expect 2 '--fail 3@0: expected CLIENT@ROUND' fit rows.svm --l2 1 --method tamuna --fail 3@0
exit $((failures > 0))
