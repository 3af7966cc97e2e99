#include "core/machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "core/env.h"

namespace tandem {
namespace {

constexpr const char* kFeatures[] = {"avx2",        "fma",         "avx512f",  "avx512_vnni",
                                     "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8",
                                     "amx_bf16",    "asimd"};

// "model name	: Intel ..." -> "Intel ..."
std::string value_of(const std::string& line) {
  const size_t at = line.find(':');
  const size_t begin = at == std::string::npos ? at : line.find_first_not_of(" \t", at + 1);
  return begin == std::string::npos ? "" : line.substr(begin);
}

}  // namespace

std::string Machine::describe() const {
  return std::to_string(threads) + "x " + cpu;
}

Machine this_machine() {
  Machine machine;
  machine.cpu = "unknown";
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line) && !line.empty();) {
    if (line.starts_with("model name")) machine.cpu = value_of(line);
    if (line.starts_with("flags") || line.starts_with("Features")) {
      std::istringstream flags(value_of(line));
      for (std::string flag; flags >> flag;) {
        if (std::find(std::begin(kFeatures), std::end(kFeatures), flag) != std::end(kFeatures)) {
          machine.features.push_back(flag);
        }
      }
    }
  }
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) machine.threads = CPU_COUNT(&set);
  const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGE_SIZE);
  if (pages > 0 && page > 0) machine.memory_bytes = uint64_t(pages) * uint64_t(page);
  return machine;
}

double load_per_core() {
  double load = 0;
  if (::getloadavg(&load, 1) != 1) return 0;
  return load / double(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
}

int ranks_here(int ranks) {
  const char* local = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
  const char* world = std::getenv("WORLD_SIZE");
  if (!local && world && std::atoi(world) == ranks) local = std::getenv("LOCAL_WORLD_SIZE");
  return std::max(1, local ? std::atoi(local) : ranks);
}

int threads_per_rank(int ranks) {
  if (env().threads > 0) return env().threads;
  return std::max(1, this_machine().threads / ranks_here(ranks));
}

}  // namespace tandem
