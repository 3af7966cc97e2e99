#include "bench/machine/diagnosis.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <span>

#include "comm/exec.h"
#include "core/median.h"
#include "core/system/machine.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr int kMaxAttempts = 3;

/// A rank's results as they are exchanged; its incoming links follow.
struct RankMessage {
  char host[64];
  char fault[96];
  int first_here;  ///< lowest rank whose memory this rank shares
  double f32_gflops, bf16_gflops, copy_gbps, all_to_all_gbps, ring_gbps;
};

/// Median; of an even number the better of both in the middle, as upper_median gives of rates, so
/// that half of all ranks may be slow.
double median_time(std::vector<double> values) {
  const auto middle = values.begin() + std::ptrdiff_t((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Adds the ratio to the median if a rate is lower by the factor.
void judge_rates(const std::vector<double>& rates, const char* name, double factor,
                 const std::vector<std::string*>& problems) {
  if (int(rates.size()) < kMinForMedian) return;
  const double median = upper_median(rates);
  for (size_t i = 0; i < rates.size(); ++i) {
    if (!problems[i]->empty() || rates[i] * factor >= median) continue;
    *problems[i] = fmt::format("slow: {:.1f} times the median ({} {:.3g}, median {:.3g})",
                               median / rates[i], name, rates[i], median);
  }
}

void judge_latencies(const std::vector<double>& times, double factor,
                     const std::vector<std::string*>& problems) {
  if (int(times.size()) < kMinForMedian) return;
  const double median = median_time(times);
  for (size_t i = 0; i < times.size(); ++i) {
    if (!problems[i]->empty() || times[i] < std::max(factor * median, median + kMinSlowUs))
      continue;
    *problems[i] =
        fmt::format("slow: {:.1f} times the median (latency {:.0f} us, median {:.0f} us)",
                    times[i] / median, times[i], median);
  }
}

void judge_ranks(Diagnosis& diagnosis) {
  std::vector<DiagnosedRank*> ranks;
  std::vector<std::string*> problems;
  for (DiagnosedRank& rank : diagnosis.ranks) {
    rank.problem = rank.machine.fault.empty() ? "" : "wrong bits: " + rank.machine.fault;
    if (!rank.problem.empty()) continue;
    ranks.push_back(&rank);
    problems.push_back(&rank.problem);
  }
  const auto compare = [&](const char* name, const auto& rate_of) {
    std::vector<double> rates;
    for (const DiagnosedRank* rank : ranks) rates.push_back(rate_of(*rank));
    judge_rates(rates, name, diagnosis.factor, problems);
  };
  compare("f32 GEMM GFLOP/s", [](const DiagnosedRank& r) { return r.machine.f32_gflops; });
  compare("bf16 GEMM GFLOP/s", [](const DiagnosedRank& r) { return r.machine.bf16_gflops; });
  compare("copy GB/s", [](const DiagnosedRank& r) { return r.machine.copy_gbps; });
  compare("loopback GB/s", [](const DiagnosedRank& r) { return r.loopback_gbps; });
}

void judge_links(Diagnosis& diagnosis) {
  for (const bool shared : {true, false}) {
    std::vector<double> rates, latencies;
    std::vector<std::string*> problems;
    for (DiagnosedLink& link : diagnosis.links) {
      const LinkHealth& health = link.health;
      if (health.shared_memory != shared) continue;
      link.problem = health.unreachable   ? "unreachable"
                     : health.wrong_bytes ? fmt::format("wrong bits: {} bytes", health.wrong_bytes)
                                          : "";
      if (!link.problem.empty()) continue;
      rates.push_back(health.gbps);
      latencies.push_back(health.latency_us);
      problems.push_back(&link.problem);
    }
    judge_rates(rates, "GB/s", diagnosis.factor, problems);
    judge_latencies(latencies, diagnosis.factor, problems);
  }
}

void judge_hosts(Diagnosis& diagnosis) {
  for (DiagnosedHost& host : diagnosis.hosts) {
    host.problem.clear();
    for (const int rank : host.ranks) {
      const std::string& problem = diagnosis.ranks[size_t(rank)].problem;
      if (problem.empty()) continue;
      host.problem += fmt::format("{}rank {}: {}", host.problem.empty() ? "" : "; ", rank, problem);
    }
  }
}

std::vector<std::byte> pack(const RankMessage& message, std::span<const LinkHealth> links) {
  std::vector<std::byte> blob(sizeof message + links.size_bytes());
  std::memcpy(blob.data(), &message, sizeof message);
  std::memcpy(blob.data() + sizeof message, links.data(), links.size_bytes());
  return blob;
}

template <size_t kSize>
void copy_text(char (&to)[kSize], const std::string& text) {
  to[text.copy(to, kSize - 1)] = 0;
}

/// Adds the results of one rank.
void unpack(Diagnosis& diagnosis, int rank, std::span<const std::byte> blob, int ranks,
            std::map<int, int>& hosts) {
  RankMessage message;
  std::vector<LinkHealth> links{size_t(ranks)};
  std::memcpy(&message, blob.data(), sizeof message);
  std::memcpy(links.data(), blob.data() + sizeof message, links.size() * sizeof(LinkHealth));
  const auto [host, is_new] = hosts.emplace(message.first_here, int(diagnosis.hosts.size()));
  if (is_new) diagnosis.hosts.push_back({message.host, {}, ""});
  diagnosis.hosts[size_t(host->second)].ranks.push_back(rank);
  DiagnosedRank found{
      .rank = rank,
      .host = host->second,
      .machine = {message.f32_gflops, message.bf16_gflops, message.copy_gbps, message.fault},
      .all_to_all_gbps = message.all_to_all_gbps,
      .ring_gbps = message.ring_gbps,
      .problem = ""};
  for (const LinkHealth& link : links) {
    if (link.from != rank) {
      diagnosis.links.push_back({link, ""});
      continue;
    }
    found.loopback_gbps = link.gbps;
    if (link.wrong_bytes && found.machine.fault.empty()) {
      found.machine.fault = fmt::format("{} bytes of its loopback", link.wrong_bytes);
    }
  }
  diagnosis.ranks.push_back(std::move(found));
}

/// Other programs make a rank slow for a while: all are measured again. Not if a link would have to
/// be waited for again.
bool is_worth_another(const Diagnosis& diagnosis) {
  const auto is_slow = [](const auto& each) { return each.problem.starts_with("slow"); };
  const auto is_cut = [](const DiagnosedLink& link) { return link.health.unreachable; };
  return (std::ranges::any_of(diagnosis.ranks, is_slow) ||
          std::ranges::any_of(diagnosis.links, is_slow)) &&
         std::ranges::none_of(diagnosis.links, is_cut);
}

/// Keeps the better speeds and all faults.
void improve(MachineHealth& best, const MachineHealth& other) {
  best.f32_gflops = std::max(best.f32_gflops, other.f32_gflops);
  best.bf16_gflops = std::max(best.bf16_gflops, other.bf16_gflops);
  best.copy_gbps = std::max(best.copy_gbps, other.copy_gbps);
  if (best.fault.empty()) best.fault = other.fault;
}

void improve(LinksHealth& best, const LinksHealth& other) {
  if (best.incoming.empty()) {
    best = other;
    return;
  }
  best.all_to_all_gbps = std::max(best.all_to_all_gbps, other.all_to_all_gbps);
  best.ring_gbps = std::max(best.ring_gbps, other.ring_gbps);
  for (size_t i = 0; i < best.incoming.size(); ++i) {
    LinkHealth& link = best.incoming[i];
    const LinkHealth& again = other.incoming[i];
    link.unreachable |= again.unreachable;
    link.wrong_bytes += again.wrong_bytes;
    link.gbps = std::max(link.gbps, again.gbps);
    link.latency_us = std::min(link.latency_us, again.latency_us);
  }
}

/// Collective. Results of all ranks, not judged yet.
Diagnosis gather(Communicator& comm, const MachineHealth& machine, const LinksHealth& links) {
  RankMessage message{.host = {},
                      .fault = {},
                      .first_here = comm.rank(),
                      .f32_gflops = machine.f32_gflops,
                      .bf16_gflops = machine.bf16_gflops,
                      .copy_gbps = machine.copy_gbps,
                      .all_to_all_gbps = links.all_to_all_gbps,
                      .ring_gbps = links.ring_gbps};
  copy_text(message.host, host_name());
  copy_text(message.fault, machine.fault);
  message.first_here = std::ranges::find_if(links.incoming, &LinkHealth::shared_memory)->from;
  Diagnosis diagnosis;
  diagnosis.network = comm.link();
  std::map<int, int> hosts;
  const auto blobs = comm.exchange(pack(message, links.incoming), "the results of the diagnosis");
  for (int from = 0; from < comm.size(); ++from) {
    unpack(diagnosis, from, blobs[size_t(from)], comm.size(), hosts);
  }
  return diagnosis;
}

}  // namespace

bool Diagnosis::is_bad() const {
  const auto has_problem = [](const auto& each) { return !each.problem.empty(); };
  return std::ranges::any_of(ranks, has_problem) || std::ranges::any_of(links, has_problem);
}

void judge(Diagnosis& diagnosis) {
  judge_ranks(diagnosis);
  judge_links(diagnosis);
  judge_hosts(diagnosis);
}

Diagnosis diagnose_world(Communicator& comm, const DiagnosisRequest& request,
                         const std::function<void(const std::string&)>& progress) {
  DiagnosisRequest local = request;
  if (comm.rank() == request.fault_rank) local.machine.fault = local.links.fault = request.fault;
  const double phase_s = kPhaseDeadlines * (request.links.seconds + request.machine.seconds);
  comm.set_deadline(phase_s);
  comm.barrier("the begin of the diagnosis");
  MachineHealth machine;
  LinksHealth links;
  Diagnosis diagnosis;
  for (int attempt = 1; attempt == 1 || (attempt <= kMaxAttempts && is_worth_another(diagnosis));
       ++attempt) {
    if (attempt > 1) progress(fmt::format("something is slow: attempt {}", attempt));
    progress("products and memory");
    improve(machine, check_machine(make_exec(comm), local.machine));
    comm.set_deadline(phase_s);
    comm.barrier("the end of the products and memory");
    improve(links, check_links(comm, local.links, progress));
    diagnosis = gather(comm, machine, links);
    diagnosis.factor = request.factor;
    judge(diagnosis);
  }
  return diagnosis;
}

}  // namespace tandem
