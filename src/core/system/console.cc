#include "core/system/console.h"

#include <fmt/format.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem {
namespace {

std::string activity;

}  // namespace

std::string rank_of_launcher() {
  // Set by mpirun, srun with PMI, torchrun (which srun may have started, one per node) and srun.
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "SLURM_PROCID"}) {
    if (const char* rank = std::getenv(name)) return rank;
  }
  return "";
}

bool speaks() {
  const std::string rank = rank_of_launcher();
  return rank.empty() || rank == "0";
}

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

}  // namespace tandem
