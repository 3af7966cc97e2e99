#include "comm/rendezvous/launch.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>

#include "tandem/error.h"

namespace tandem {
namespace {

constexpr int kMaxRanks = 1 << 16, kMaxPort = 65535, kMaxLaunched = 1 << 24;

std::string text(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

int number(const char* name, int minimum, int maximum) {
  const std::string value = text(name);
  int result = 0;
  const char* end = value.data() + value.size();
  const auto [stop, code] = std::from_chars(value.data(), end, result);
  if (code != std::errc() || stop != end || result < minimum || result > maximum) {
    throw InvalidArgument(fmt::format("{}={}: expected {} to {}", name, value, minimum, maximum));
  }
  return result;
}

/// RANK without WORLD_SIZE, or the reverse: each process would be a world of its own.
void refuse_half(const char* there, const char* missing) {
  if (!std::getenv(there) || std::getenv(missing)) return;
  if (std::string_view(there) == "WORLD_SIZE" && text(there) == "1") return;
  throw InvalidArgument(
      fmt::format("{}={} without {}: expected both, as torchrun sets them, or neither", there,
                  text(there), missing));
}

}  // namespace

std::optional<MpiLaunch> launched_by_some_mpi() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"}) {
    if (std::getenv(name)) return MpiLaunch{name, number(name, 1, kMaxLaunched)};
  }
  constexpr const char* kSlurm = "SLURM_STEP_NUM_TASKS";
  if (!std::getenv("PMIX_RANK") || !std::getenv(kSlurm)) return std::nullopt;
  return MpiLaunch{kSlurm, number(kSlurm, 1, kMaxLaunched)};
}

std::vector<std::string> variables_of_other_launchers() {
  std::vector<std::string> names;
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string_view set(*entry);
    const std::string_view name = set.substr(0, set.find('='));
    for (const std::string_view begin :
         {"OMPI_", "PMIX_", "PMI_", "PMI2_", "PRTE_", "MV2_COMM_WORLD_", "MPI_LOCAL", "SLURM_STEP",
          "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"}) {
      if (name.starts_with(begin)) names.emplace_back(name);
    }
  }
  return names;
}

std::string first_host(std::string_view nodes) {
  std::string host;
  size_t at = 0;
  while (at < nodes.size() && nodes[at] != ',') {
    if (nodes[at] != '[') {
      host += nodes[at++];
      continue;
    }
    const std::string_view list = nodes.substr(at + 1);
    host += list.substr(0, list.find_first_of(",-]"));
    const size_t end = list.find(']');
    if (end == list.npos) break;
    at += 1 + end + 1;
  }
  return host;
}

int local_rank(int rank) {
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK", "SLURM_LOCALID"}) {
    if (std::getenv(name)) return number(name, 0, kMaxRanks - 1);
  }
  return rank;
}

bool is_loopback(const std::string& host) {
  in_addr v4{};
  in6_addr v6{};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  if (inet_pton(AF_INET6, host.c_str(), &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6);
  return host == "localhost";
}

std::string store_world(const std::string& world) {
  return world + " store";
}

std::optional<Launch> launched_by_environment() {
  Launch launch;
  const bool slurm = std::getenv("SLURM_STEP_NUM_TASKS") && std::getenv("SLURM_PROCID");
  if (std::getenv("RANK") && std::getenv("WORLD_SIZE") && (std::getenv("MASTER_ADDR") || !slurm)) {
    launch.size = number("WORLD_SIZE", 1, kMaxRanks);
    launch.rank = number("RANK", 0, launch.size - 1);
    if (launch.size == 1) return std::nullopt;
    launch.host = text("MASTER_ADDR");
    if (launch.host.empty()) {
      throw InvalidArgument(
          fmt::format("MASTER_ADDR is not set: RANK={} WORLD_SIZE={}: expected rank 0's host",
                      launch.rank, launch.size));
    }
    if (launch.host.starts_with('[') && launch.host.ends_with(']')) {
      launch.host = launch.host.substr(1, launch.host.size() - 2);
    }
    // torchrun's agent listens on the port itself.
    const int taken = text("TORCHELASTIC_USE_AGENT_STORE") == "True" ? 1 : 0;
    launch.port = number("MASTER_PORT", 1, kMaxPort - taken) + taken;
    launch.port_from = fmt::format("MASTER_PORT={}{}", text("MASTER_PORT"), taken ? " + 1" : "");
    launch.one_host = is_loopback(launch.host) || text("LOCAL_WORLD_SIZE") == text("WORLD_SIZE");
    launch.world = "torchrun " + text("TORCHELASTIC_RUN_ID");
    launch.has_store = text("TORCHELASTIC_RUN_ID").starts_with(kLauncherRunId);
    if (text("TORCHELASTIC_RUN_ID").starts_with(kHostsRunId)) launch.one_host = false;
  } else if (slurm) {
    launch.size = number("SLURM_STEP_NUM_TASKS", 1, kMaxRanks);
    launch.rank = number("SLURM_PROCID", 0, launch.size - 1);
    const std::string nodes = text("SLURM_STEP_NODELIST");
    launch.host = first_host(nodes);
    if (launch.host.empty()) {
      throw InvalidArgument(fmt::format(
          "SLURM_STEP_NODELIST={}: expected the hosts of the {} ranks", nodes, launch.size));
    }
    launch.one_host = nodes.find_first_of(",[") == nodes.npos;
    launch.world = "slurm " + text("SLURM_JOB_ID") + "." + text("SLURM_STEP_ID");
    // Concurrent steps of a job have other ports, below those that the system gives to clients.
    const uint64_t id = uint64_t(number("SLURM_JOB_ID", 0, 2147483647));
    const uint64_t step = std::strtoull(text("SLURM_STEP_ID").c_str(), nullptr, 10);
    launch.port = int(20000 + (id + 997 * step) % 12000);
    launch.port_from = "SLURM_JOB_ID=" + text("SLURM_JOB_ID");
  } else {
    refuse_half("RANK", "WORLD_SIZE");
    refuse_half("WORLD_SIZE", "RANK");
    return std::nullopt;
  }
  if (launch.size == 1) return std::nullopt;
  launch.local_rank = local_rank(launch.rank);
  return launch;
}

}  // namespace tandem
