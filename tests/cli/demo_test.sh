#!/usr/bin/env bash
# demo_test.sh DEMO: a second `make run` replaces the first one's output and nothing else. A substitute
# program writes the files that tandem would.
set -eu
demo=$1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
fail() { echo "$*" >&2; exit 1; }
cat >"$dir/tandem" <<'END'
#!/usr/bin/env bash
command=$1 out= folder=$2
echo "$*" >>"${0%/*}/calls"
[ "$command" != info ] || printf '  %-18s %s\n' "default device" "${DEVICE:-cpu}"
while [ $# -gt 0 ]; do
  case $1 in --out) out=$2 ;; --json) echo '{"bits_per_byte": 2.5}' >"$2" ;; esac
  shift
done
[ "$command" != report ] || echo sample >"$folder/sample.txt"
[ "$command" = train ] || exit 0
[ ! -e "$out/metrics.jsonl" ] || { echo "$out already holds a run" >&2; exit 2; }
mkdir -p "$out/final" "$out/checkpoints"
echo "$0" | tee "$out/heldout.txt" >"$out/metrics.jsonl"
END
chmod +x "$dir/tandem"
run() { "$demo" "$dir/tandem" "$dir/out" "$dir/demo.toml" >"$dir/log" 2>&1; }

mkdir -p "$dir/out/mine/final"
echo dear >"$dir/out/mine/final/model.safetensors"
echo dear >"$dir/out/notes.txt"
run || fail "first run: $(cat "$dir/log")"
echo old >"$dir/out/checkpoints/old"
run || fail "second run: $(cat "$dir/log")"
[ "$(cat "$dir/out/mine/final/model.safetensors" "$dir/out/notes.txt")" = $'dear\ndear' ] ||
  fail "what the demo did not write is gone"
[ ! -e "$dir/out/checkpoints/old" ] || fail "what the demo wrote is still there"

(
  exec 9>>"$dir/out/.demo" && flock 9
  ! run || fail "two demos at once"
)
rm "$dir/out/.demo"
! run || fail "a run of one's own was replaced"
grep -q 'is not known to be from an earlier demo' "$dir/log" || fail "said: $(cat "$dir/log")"
[ -e "$dir/out/metrics.jsonl" ] || fail "a run of one's own is gone"

rm -rf "$dir"/out/*
run || fail "emptied folder: $(cat "$dir/log")"
rm "$dir/out/metrics.jsonl"
echo mine >"$dir/out/metrics.jsonl.new" && mv "$dir/out/metrics.jsonl.new" "$dir/out/metrics.jsonl"
! run || fail "a run of one's own in the demo's place was replaced"

rm -rf "$dir/out" "$dir/calls"
run || fail "on CPU ranks: $(cat "$dir/log")"
grep -q '^train .* --tp 2 ' "$dir/calls" || fail "on CPU ranks: $(cat "$dir/calls")"
! grep -q GPU "$dir/log" || fail "on CPU ranks: $(cat "$dir/log")"
DEVICE=gpu run || fail "on a GPU: $(cat "$dir/log")"
tail -n 2 "$dir/calls" | grep -q '^train .* --device gpu ' || fail "on a GPU: $(cat "$dir/calls")"
grep -q 'Training on a GPU: ' "$dir/log" && grep -q 'One GPU has no communication to hide' "$dir/log" ||
  fail "on a GPU: $(cat "$dir/log")"
