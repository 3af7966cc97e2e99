# Sourced: extracts text of docs/start/tour.md and docs/start/install.md in $source.

block() {  # LANGUAGE PATTERN: the first code block with such a line
  awk -v fence="\`\`\`$1" -v pattern="$2" '
    $0 == "```" && inside { inside = 0; if (found) { printf "%s", text; exit } }
    inside { text = text $0 "\n"; if ($0 ~ pattern) found = 1 }
    $0 == fence { inside = 1; text = "" }' "$source/docs/start/tour.md"
}

line() {  # PREFIX: the first line that begins with it
  grep -m 1 "^$1" "$source/docs/start/install.md" || true
}

inline() {  # PREFIX: the first command between backticks that begins with it
  tr '\n' ' ' <"$source/docs/start/install.md" | grep -oP "\`\K\Q$1\E[^\`]*" | head -n 1 || true
}
