#include "core/system/machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>

#include "core/system/env.h"
#include "core/system/lines.h"

namespace tandem {
namespace {

constexpr const char* kFeatures[] = {"avx2",        "fma",         "avx512f",  "avx512_vnni",
                                     "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8",
                                     "amx_bf16",    "asimd"};

std::string_view variable_text(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

int to_number(std::string_view text) {
  int number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

/// Number of ranks that a launcher started on this host; 0 without a launcher. `variable`: one that
/// the launcher sets for each rank.
struct LaunchedHere {
  int ranks = 0;
  const char* variable = "";
};

LaunchedHere launched_here(int ranks) {
  const auto value = [](const char* name) { return to_number(variable_text(name)); };
  if (const int local = value("OMPI_COMM_WORLD_LOCAL_SIZE"); local > 0) {
    return {local, "OMPI_COMM_WORLD_RANK"};
  }
  if (value("WORLD_SIZE") == ranks && value("LOCAL_WORLD_SIZE") > 0) {
    return {value("LOCAL_WORLD_SIZE"), "RANK"};
  }
  if (value("SLURM_STEP_NUM_TASKS") != ranks || !std::getenv("SLURM_PROCID")) return {};
  const int node = value("SLURM_NODEID");
  for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) {
    const int tasks = slurm_tasks_of(variable_text(name), node);
    if (tasks > 0) return {tasks, "SLURM_PROCID"};
  }
  return {};
}

/// Entry of a process's file that begins with `start`, without it; entries end with `end`. Empty if
/// unreadable.
std::string read_entry(const std::string& path, std::string_view start, char end) {
  std::ifstream file(path, std::ios::binary);
  for (std::string entry; std::getline(file, entry, end);) {
    if (entry.starts_with(start)) return entry.substr(start.size());
  }
  return "";
}

/// Whether the launcher may run on other processors than the ranks it started. A shell between the
/// two, which has the rank's `variable`, does not count as the launcher.
bool is_bound_by_launcher(const char* variable) {
  cpu_set_t affinity;
  if (sched_getaffinity(0, sizeof affinity, &affinity) != 0) return false;
  std::string affinity_list;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &affinity)) continue;
    const int first = cpu;
    while (cpu + 1 < CPU_SETSIZE && CPU_ISSET(cpu + 1, &affinity)) ++cpu;
    affinity_list += (affinity_list.empty() ? "" : ",") + std::to_string(first);
    if (cpu > first) affinity_list += "-" + std::to_string(cpu);
  }
  const std::string name = std::string(variable) + "=";
  std::string process = std::to_string(getppid());
  for (int level = 0; level < 8; ++level) {
    const std::string folder = "/proc/" + process;
    const std::string list = read_entry(folder + "/status", "Cpus_allowed_list:\t", '\n');
    if (!list.empty() && list != affinity_list) return true;
    if (read_entry(folder + "/environ", name, '\0').empty()) return false;
    process = read_entry(folder + "/status", "PPid:\t", '\n');
  }
  return false;
}

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

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

std::string boot_id() {
  std::string id;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::getline(file, id);
  return id;
}

Machine this_machine() {
  Machine machine;
  machine.cpu = "unknown";
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line) && !line.empty();) {
    if (line.starts_with("model name")) machine.cpu = value_of(line);
    if (line.starts_with("flags") || line.starts_with("Features")) {
      for (std::string& flag : words_of(value_of(line))) {
        if (std::find(std::begin(kFeatures), std::end(kFeatures), flag) != std::end(kFeatures)) {
          machine.features.push_back(std::move(flag));
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

uint64_t usable_memory_bytes() {
  uint64_t bytes = this_machine().memory_bytes;
  for (const char* file :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    uint64_t limit = 0;  // "max": none
    if (std::ifstream(file) >> limit && limit > 0) {
      bytes = bytes == 0 ? limit : std::min(bytes, limit);
    }
  }
  return bytes;
}

double load_per_core() {
  double load = 0;
  if (::getloadavg(&load, 1) != 1) return 0;
  return load / double(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
}

int slurm_tasks_of(std::string_view tasks_per_node, int node) {
  while (!tasks_per_node.empty()) {
    const size_t comma = tasks_per_node.find(',');
    const std::string_view item = tasks_per_node.substr(0, comma);
    const size_t times = item.find("(x");
    node -= times == item.npos ? 1 : to_number(item.substr(times + 2));
    if (node < 0) return to_number(item);
    tasks_per_node.remove_prefix(comma == item.npos ? tasks_per_node.size() : comma + 1);
  }
  return 0;
}

int ranks_here(int ranks) {
  const LaunchedHere here = launched_here(ranks);
  return here.ranks > 0 ? here.ranks : ranks;
}

int threads_per_rank(int ranks) {
  if (env().threads > 0) return env().threads;
  const int threads = this_machine().threads;
  const LaunchedHere here = launched_here(ranks);
  if (here.ranks > 0 && is_bound_by_launcher(here.variable)) return threads;
  return std::max(1, threads / ranks_here(ranks));
}

}  // namespace tandem
