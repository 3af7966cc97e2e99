#!/usr/bin/env bash
# man_test.sh TANDEM SOURCE_DIR CMAKE: a man page of each command, with every option of its help; troff has no complaint. Colours of
# errors are for terminals, without NO_COLOR.
set -u
tandem=$(realpath "$1") source=$(realpath "$2") cmake=$3
. "$(dirname "$0")/expect.sh"
"$cmake" "-DPROGRAM=$tandem" -DFOLDER=man -P "$source/cmake/man_pages.cmake" >log 2>&1 || fail "$(cat log)"
commands=$("$tandem" --help | sed -n '/^Subcommands:/,/^$/s/^  \([a-z-]*\).*/\1/p')
[ "$(wc -w <<<"$commands")" -ge 15 ] || fail "commands: $commands"
[ "$(ls man)" = "$( (echo tandem.1; printf 'tandem-%s.1\n' $commands) | LC_ALL=C sort)" ] || fail "pages: $(ls man)"
for command in train plan; do
  for word in $("$tandem" "$command" --help | grep -o '^  -[^ ]*\(, --[a-z-]*\)\?' | grep -o -- '--[a-z-]*'); do
    grep -qF -- "${word//-/\\-}" "man/tandem-$command.1" || fail "tandem-$command.1 lacks $word"
  done
done
grep -q '^\.SH "PLAN SCHEDULE"$' man/tandem-plan.1 || fail "no section of plan schedule"
for page in tandem tandem-train tandem-plan; do
  grep -q "^$page .- [A-Z]" "man/$page.1" || fail "$page.1 has no summary: $(sed -n 3p "man/$page.1")"
done
if command -v groff >/dev/null; then
  said=$(cat man/*.1 | groff -K utf8 -man -ww -T utf8 2>&1 >text) || fail "groff: $said"
  [ -z "$said" ] || fail "groff: $said"
else
  echo 'groff is not installed: pages are not formatted'
fi
on_terminal() { script -qec "$tandem frob" /dev/null </dev/null; }
if command -v script >/dev/null; then
  red=$'\e[1;31merror\e[0m'
  text=$(TERM=xterm NO_COLOR='' on_terminal)
  [[ $text == *"tandem: $red: "* ]] || fail "no colour on a terminal: $text"
  for setting in NO_COLOR=1 TERM=dumb; do
    text=$(export TERM=xterm; export "$setting"; on_terminal)
    [[ $text == *'tandem: error: '* ]] || fail "$setting: $text"
  done
else
  echo 'script is not installed: colours are not looked at on a terminal'
fi
expect 2 '^tandem: error: ' frob
[ "$failures" = 0 ]
