// `tandem data check` as a program, and the steps of a ledger.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <sstream>
#include <string>
#include <variant>
#include <vector>

#include "core/system/files.h"
#include "engine/data/ledger/ledger_lines.h"

namespace tandem {

/// Exit status of `tandem data check`, which names faults on standard output; -1: it was killed.
inline int check_data(const std::string& program, const std::string& out) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::execl(program.c_str(), "tandem", "data", "check", out.c_str(), static_cast<char*>(nullptr));
    ::_exit(127);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

inline std::vector<LedgerStep> read_steps(const std::string& out) {
  std::istringstream lines(read_file(out + "/ledger.jsonl"));
  std::vector<LedgerStep> steps;
  for (std::string line; std::getline(lines, line);) {
    const LedgerLine parsed = parse_ledger_line(line);
    if (const auto* step = std::get_if<LedgerStep>(&parsed.record)) steps.push_back(*step);
  }
  return steps;
}

}  // namespace tandem
