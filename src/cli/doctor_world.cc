#include "cli/doctor_world.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "cli/result_output.h"
#include "core/system/console.h"
#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/printable.h"
#include "engine/launch/local_launch.h"
#include "engine/launch/processes/launch_hosts.h"
#include "engine/launch/processes/launched_process.h"
#include "tandem/cuda.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

using DoctorJson = nlohmann::ordered_json;

constexpr int kDefaultRanks = 4;
constexpr size_t kMaxLines = 16;  ///< of ranks and of links; of more, only the bad ones are printed
constexpr int kKilled = 128;      ///< exit statuses above: the launcher has said which rank
constexpr std::array<std::pair<std::string_view, CheckFault>, 3> kFaults{
    {{"gemm", CheckFault::gemm}, {"memory", CheckFault::memory}, {"message", CheckFault::message}}};

void set_fault(const std::string& inject, int ranks, DiagnosisRequest& request) {
  if (inject.empty()) return;
  const size_t colon = inject.find(':');
  const std::string rank = inject.substr(0, colon);
  const bool is_number =
      !rank.empty() && rank.size() < 6 && rank.find_first_not_of("0123456789") == rank.npos;
  for (const auto& [name, fault] : kFaults) {
    if (colon == inject.npos || inject.substr(colon + 1) != name) continue;
    request.fault = fault;
  }
  if (is_number) request.fault_rank = std::stoi(rank);
  if (request.fault != CheckFault::none && is_number && request.fault_rank < ranks) return;
  throw InvalidArgument(fmt::format(
      "doctor --inject {}: expected RANK:KIND, a rank below {} and gemm, memory or message",
      printable(inject), ranks));
}

/// "ok", "slow", "wrong bits" or "unreachable".
std::string verdict_of(const std::string& problem) {
  return problem.empty() ? "ok" : problem.substr(0, problem.find(':'));
}

std::string ranks_text(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return fmt::format("rank {}", ranks[0]);
  if (ranks.back() - ranks[0] + 1 == int(ranks.size())) {
    return fmt::format("ranks {} to {}", ranks[0], ranks.back());
  }
  return fmt::format("ranks {}", fmt::join(ranks, ", "));
}

DoctorJson to_json(const Diagnosis& diagnosis) {
  DoctorJson json{{"verdict", diagnosis.is_bad() ? "bad" : "ok"},
                  {"factor", diagnosis.factor},
                  {"hosts", DoctorJson::array()},
                  {"ranks", DoctorJson::array()},
                  {"links", DoctorJson::array()}};
  for (const DiagnosedHost& host : diagnosis.hosts) {
    json["hosts"].push_back({{"host", host.name},
                             {"ranks", host.ranks},
                             {"verdict", host.problem.empty() ? "ok" : "bad"},
                             {"problem", host.problem}});
  }
  for (const DiagnosedRank& rank : diagnosis.ranks) {
    json["ranks"].push_back({{"rank", rank.rank},
                             {"host", diagnosis.hosts[size_t(rank.host)].name},
                             {"verdict", verdict_of(rank.problem)},
                             {"problem", rank.problem},
                             {"f32_gflops", rank.machine.f32_gflops},
                             {"bf16_gflops", rank.machine.bf16_gflops},
                             {"copy_gbps", rank.machine.copy_gbps},
                             {"loopback_gbps", rank.loopback_gbps},
                             {"all_to_all_gbps", rank.all_to_all_gbps},
                             {"ring_all_reduce_gbps", rank.ring_gbps}});
  }
  for (const auto& [link, problem] : diagnosis.links) {
    json["links"].push_back({{"from", link.from},
                             {"to", link.to},
                             {"link", link.shared_memory ? "shm" : diagnosis.network},
                             {"verdict", verdict_of(problem)},
                             {"problem", problem},
                             {"latency_us", link.latency_us},
                             {"gbps", link.gbps}});
  }
  return json;
}

std::string problem_text(const DoctorJson& json) {
  const std::string problem = json.at("problem");
  return problem.empty() ? "ok" : problem;
}

void print_ranks(const DoctorJson& ranks) {
  for (const DoctorJson& rank : ranks) {
    if (ranks.size() > kMaxLines && rank.at("problem") == "") continue;
    fmt::print(
        "rank {} on {}: {}; GEMM f32 {:.4g}, bf16 {:.4g} GFLOP/s; copy {:.3g}, loopback "
        "{:.3g} GB/s\n",
        rank.at("rank").get<int>(), single_line(rank.at("host").get<std::string>()),
        problem_text(rank), rank.at("f32_gflops").get<double>(),
        rank.at("bf16_gflops").get<double>(), rank.at("copy_gbps").get<double>(),
        rank.at("loopback_gbps").get<double>());
  }
}

void print_links(const DoctorJson& links) {
  for (const DoctorJson& link : links) {
    if (links.size() > kMaxLines && link.at("problem") == "") continue;
    fmt::print("link {} -> {}, {}: {}; {:.4g} us, {:.3g} GB/s\n", link.at("from").get<int>(),
               link.at("to").get<int>(), link.at("link").get<std::string>(), problem_text(link),
               link.at("latency_us").get<double>(), link.at("gbps").get<double>());
  }
}

/// The lowest of the ranks' rates.
double slowest(const DoctorJson& ranks, const char* key) {
  double rate = ranks.at(0).at(key);
  for (const DoctorJson& rank : ranks) rate = std::min(rate, rank.at(key).get<double>());
  return rate;
}

void print_diagnosis(const DoctorJson& json) {
  const DoctorJson &hosts = json.at("hosts"), &ranks = json.at("ranks"), &links = json.at("links");
  for (const DoctorJson& host : hosts) {
    fmt::print("host {}, {}: {}\n", single_line(host.at("host").get<std::string>()),
               ranks_text(host.at("ranks")), problem_text(host));
  }
  print_ranks(ranks);
  print_links(links);
  if (ranks.size() > 1 && slowest(ranks, "ring_all_reduce_gbps") > 0) {
    fmt::print("all at once: all-to-all {:.3g}, ring all-reduce {:.3g} GB/s into each rank\n",
               slowest(ranks, "all_to_all_gbps"), slowest(ranks, "ring_all_reduce_gbps"));
  }
  const auto count_bad = [](const DoctorJson& each) {
    return std::ranges::count_if(each,
                                 [](const DoctorJson& one) { return one.at("problem") != ""; });
  };
  fmt::print("{} of {} hosts and {} of {} links are bad (slow: {:.3g} times the median of its kind",
             count_bad(hosts), hosts.size(), count_bad(links), links.size(),
             json.at("factor").get<double>());
  fmt::print("{})\n", int(ranks.size()) < kMinForMedian ? "; too few ranks for a median" : "");
}

/// Prints and writes what was found, and ends with its status.
void report_diagnosis(const DoctorRequest& request, const DoctorJson& json) {
  if (request.output.shows_text()) print_diagnosis(json);
  request.output.write_json(dump_json(json) + "\n");
  if (json.at("verdict") == "ok") return;
  finish_output();
  throw Ended{1};
}

void check_world(DoctorRequest request) {
  WorldOptions world;
  set_devices(request.devices, world);
  DoctorJson json;
  bool is_first = false;
  run_ranks(request.devices, world, [&](Communicator& comm) {
    DiagnosisRequest diagnosis = request.diagnosis;
    set_fault(request.inject, comm.size(), diagnosis);
    is_first = comm.rank() == 0;
    json = to_json(diagnose_world(comm, diagnosis, [&](const std::string& what) {
      if (is_first) complain("tandem: doctor: " + what);
    }));
  });
  if (request.rank_side) {
    if (is_first) fmt::print("{}\n", dump_json(json));
  } else if (is_first) {
    report_diagnosis(request, json);
  } else if (json.at("verdict") != "ok") {
    throw Ended{1};
  }
}

int count_doctor_ranks(const DoctorRequest& request) {
  if (request.ranks > 0) return request.ranks;
  if (request.hosts.empty()) {
    return request.devices.on_gpus() ? std::max(1, gpu_count()) : kDefaultRanks;
  }
  const auto hosts = parse_hosts(read_small_file(request.hosts), request.hosts);
  return std::max(
      1, int(std::ranges::count_if(hosts, [](const LaunchHost& host) { return host.slots != 0; })));
}

/// Sets the device, of ranks here or on hosts whose GPUs are not known.
void set_doctor_devices(DoctorRequest& request) {
  DeviceOptions& devices = request.devices;
  if (!request.hosts.empty()) {
    if (!devices.device.empty()) return;
    const DeviceChoice choice = default_device({}, {"--hosts: --device gpu checks their GPUs", {}});
    devices.device = choice.on_gpus ? "gpu" : "cpu";
    devices.note = choice.note;
    return;
  }
  WorldOptions world;
  world.ranks = std::max(1, request.ranks);
  set_devices(devices, world);
}

void start_world(DoctorRequest request) {
  set_doctor_devices(request);
  print_choice(request.devices.note);
  LaunchRequest launch;
  launch.ranks = count_doctor_ranks(request);
  launch.hosts = request.hosts;
  launch.remote_shell = request.remote_shell;
  launch.start_timeout_s = request.start_timeout_s;
  launch.command = {std::filesystem::read_symlink("/proc/self/exe").string(),
                    "doctor",
                    "--rank-side",
                    "--device",
                    request.devices.device,
                    "--factor",
                    fmt::to_string(request.diagnosis.factor),
                    "--seconds",
                    fmt::to_string(request.diagnosis.machine.seconds),
                    "--link-timeout",
                    fmt::to_string(request.diagnosis.links.seconds)};
  if (!request.inject.empty()) {
    DiagnosisRequest checked;
    set_fault(request.inject, launch.ranks, checked);
    launch.command.insert(launch.command.end(), {"--inject", request.inject});
  }
  std::string result, error;
  launch.print = [&](int, int stream, const std::string& line) {
    if (stream == 0) {
      result += line;
    } else if (!line.starts_with("tandem: rank ") || line.find("error: ") == line.npos) {
      print_line(stream, line);
    } else if (error.empty()) {
      error = line;
    }
  };
  const int status = run_launch(launch);
  if (status > 0 && status < kKilled && !error.empty()) print_line(1, error);
  if (status > 0) throw Ended{status};
  const auto json = parse_json<DoctorJson>(result);
  if (!json.is_object()) {
    throw Error(fmt::format("doctor: {}: expected the results of rank 0", printable(result)));
  }
  report_diagnosis(request, json);
}

}  // namespace

void run_doctor(const DoctorRequest& request) {
  const bool in_world = request.rank_side || launched();
  if (in_world && (request.ranks > 0 || !request.hosts.empty())) {
    throw InvalidArgument(
        "doctor -n, --hosts: this process is a rank of a launcher: expected neither");
  }
  if (!request.rank_side) request.output.check();
  in_world ? check_world(request) : start_world(request);
}

}  // namespace tandem::cli
