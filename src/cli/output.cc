#include "cli/output.h"

#include <fmt/format.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <utility>

#include "cli/commands.h"
#include "cli/usage.h"
#include "core/printable.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

std::string activity;

}  // namespace

void finish_output() {
  errno = 0;
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) throw_output_failed(errno);
}

void throw_output_failed(int reason) {
  if (reason == EPIPE) throw Ended{128 + SIGPIPE};
  throw IoError(fmt::format("standard output: cannot write{}{}", reason ? ": " : "",
                            reason ? std::strerror(reason) : ""));
}

void complain(const std::string& text) {
  const std::string line = text + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
}

void note(const std::string& text) {
  if (speaks()) complain("tandem: " + single_line(text));
}

void now_doing(std::string what) {
  activity = std::move(what);
}

const std::string& doing() {
  return activity;
}

}  // namespace tandem::cli
