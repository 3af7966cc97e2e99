#include "engine/report/diagnosis.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "core/system/printable.h"
#include "engine/report/links.h"
#include "engine/report/ranks/drift.h"
#include "engine/report/ranks/rank_rows.h"
#include "engine/report/ranks/stragglers.h"
#include "engine/report/receipts.h"
#include "observe/rank_records.h"
#include "tandem/error.h"

namespace tandem::report {
namespace {

constexpr size_t kMaxSlowRanks = 5, kMaxSlowLinks = 3, kDriftRows = 400;
constexpr double kMinShown = .005;

/// Means over rows and ranks.
struct Mean {
  double step_ms = 0;
  PhaseTimes phases{};
};

Mean mean_of(std::span<const RankRow> rows) {
  Mean mean;
  double steps = 0;
  for (const RankRow& row : rows) {
    for (const RankFrame& frame : row.frames) {
      steps += frame.steps;
      mean.step_ms += frame.step_ms * frame.steps;
      for (size_t i = 0; i < kPhases; ++i) mean.phases[i] += frame.phases[i] * frame.steps;
    }
  }
  mean.step_ms /= steps;
  for (double& ms : mean.phases) ms /= steps;
  return mean;
}

std::string describe_run(std::span<const RankHistory> ranks, std::span<const RankRow> rows,
                         const Mean& mean) {
  std::set<std::string> hosts;
  for (const RankHistory& history : ranks) hosts.insert(history.position.host);
  int64_t steps = 0;
  for (const RankRow& row : rows) steps += row.last - row.first + 1;
  return fmt::format(
      "{} steps up to step {}: {:.2f} ms a step, {:.0f} s; {} rank{} on {} host{}{}", steps,
      rows.back().last, mean.step_ms, mean.step_ms * double(steps) / 1e3, ranks.size(),
      ranks.size() == 1 ? "" : "s", hosts.size(), hosts.size() == 1 ? "" : "s",
      ranks.front().position.on_gpu ? "; times are those of the hosts, not of GPUs" : "");
}

std::string describe_split(const Mean& mean) {
  std::vector<size_t> order;
  double rest = mean.step_ms;
  for (size_t i = 0; i < kPhases; ++i) {
    rest -= mean.phases[i];
    if (mean.phases[i] > kMinShown * mean.step_ms) order.push_back(i);
  }
  std::ranges::sort(order, std::greater<>(), [&](size_t i) { return mean.phases[i]; });
  std::string text = "time of a step, mean of the ranks:";
  for (const size_t i : order) {
    text += fmt::format(" {} {:.1f} %,", name_of(Phase(i)), 100 * mean.phases[i] / mean.step_ms);
  }
  return text + fmt::format(" other {:.1f} %", 100 * std::max(0.0, rest) / mean.step_ms);
}

const RankPosition& position_of(std::span<const RankHistory> ranks, int rank) {
  return std::ranges::find(ranks, rank, [](const RankHistory& h) { return h.position.rank; })
      ->position;
}

std::vector<std::string> describe_slow(std::span<const RankHistory> ranks,
                                       std::span<const Straggler> slow) {
  if (slow.empty()) {
    return {ranks.size() < 2 ? "one rank: none to compare it with"
                             : "no rank is slower than its peers by more than noise"};
  }
  std::vector<std::string> lines;
  for (const Straggler& straggler : slow.first(std::min(slow.size(), kMaxSlowRanks))) {
    lines.push_back("slow: " + describe(straggler, position_of(ranks, straggler.rank)));
  }
  if (slow.size() > kMaxSlowRanks) {
    lines.back() += fmt::format("; and {} more", slow.size() - kMaxSlowRanks);
  }
  return lines;
}

std::string describe_link(const SlowLink& link, std::span<const RankHistory> ranks,
                          double step_ms) {
  const RankPosition &from = position_of(ranks, link.from), &to = position_of(ranks, link.to);
  return fmt::format(
      "rank {} {} rank {} ({}, host {} to {}): a message of {} takes {:.3f} ms, {:.1f} times the "
      "median of {} other link{}, {:.1f} % of the step",
      link.from, link.is_pair ? "to and from" : "to", link.to, axes_between(from, to), from.host,
      to.host, link.operation, link.ms, link.ratio, link.other_links,
      link.other_links == 1 ? "" : "s", 100 * link.lost_ms / step_ms);
}

/// No line without a trace.
std::vector<std::string> describe_links(const LinkReport& links, std::span<const RankHistory> ranks,
                                        double step_ms) {
  if (!links.has_trace) return {};
  if (links.slow.empty()) {
    return {fmt::format("no link is slower than others of its axis: {} judged, steps {} to {}",
                        links.judged, links.first_step, links.last_step)};
  }
  std::vector<std::string> lines;
  for (const SlowLink& link :
       std::span(links.slow).first(std::min(links.slow.size(), kMaxSlowLinks))) {
    lines.push_back("slow link: " + describe_link(link, ranks, step_ms));
  }
  if (links.slow.size() > kMaxSlowLinks) {
    lines.back() += fmt::format("; and {} more", links.slow.size() - kMaxSlowLinks);
  }
  return lines;
}

std::string advice(const Mean& mean, std::span<const Straggler> slow, const LinkReport& links) {
  constexpr double kWorthIt = .03;
  const double of_link = links.slow.empty() ? 0 : links.slow.front().lost_ms / mean.step_ms;
  const double of_rank = slow.empty() ? 0 : slow.front().share_of_step;
  if (of_link > std::max(kWorthIt, of_rank)) {
    const SlowLink& link = links.slow.front();
    return fmt::format(
        "held back most by the link of ranks {} and {}: test it (tandem doctor without a run), its "
        "cable and switch, or move the ranks",
        link.from, link.to);
  }
  if (!slow.empty() && slow.front().share_of_step > kWorthIt) {
    return fmt::format(
        "held back most by rank {}: take its processor, memory and link from the job "
        "and compare, or replace it",
        slow.front().rank);
  }
  struct Remedy {
    Phase phase;
    const char* text;
  };
  constexpr Remedy kRemedies[] = {
      {Phase::data, "read or tokenize ahead of the run (tandem data index, token files)"},
      {Phase::tp_wait, "a smaller parallel.tp, or parallel.codec for its sums (int8)"},
      {Phase::cp_wait, "a smaller parallel.cp, which needs more memory"},
      {Phase::ep_wait, "a smaller parallel.ep, more even experts (model.aux_loss_coeff)"},
      {Phase::pp_wait, "more microbatches (train.microbatch), another parallel.schedule"},
      {Phase::dp_wait, "a larger batch, or parallel.codec for gradients and weights"},
      {Phase::sync_wait, "sync.delay and sync.fragments, or a smaller sync.codec"},
      {Phase::step_wait, "more even work of the ranks: documents, experts, layers_per_stage"},
      {Phase::checkpoint, "checkpoints less often (checkpoint.every), or a faster disk"}};
  const auto largest = std::ranges::max_element(
      kRemedies, {}, [&](const Remedy& remedy) { return mean.phases[size_t(remedy.phase)]; });
  const double share = mean.phases[size_t(largest->phase)] / mean.step_ms;
  if (share < kWorthIt) return "held back by nothing but its computation";
  return fmt::format("held back most by {}, {:.1f} % of the step: try {}", name_of(largest->phase),
                     100 * share, largest->text);
}

}  // namespace

std::vector<std::string> diagnose(const std::string& dir) {
  const std::vector<RankHistory> ranks = read_rank_records(dir + "/ranks");
  if (ranks.empty()) {
    throw IoError(fmt::format("{}/ranks: no records: expected those of a run with trace.ranks",
                              printable(dir)));
  }
  std::vector<const RankHistory*> all;
  for (const RankHistory& history : ranks) all.push_back(&history);
  const std::vector<RankRow> rows = align(all, kDriftRows);
  if (rows.empty()) {
    throw IoError(
        fmt::format("{}/ranks: no step has records of all {} ranks", printable(dir), ranks.size()));
  }
  const Mean mean = mean_of(rows);
  const std::vector<Straggler> slow = find_stragglers(ranks);
  std::vector<std::string> lines{describe_run(ranks, rows, mean), describe_split(mean)};
  for (std::string& line : describe_slow(ranks, slow)) lines.push_back(std::move(line));
  const LinkReport links = read_links(dir, ranks);
  for (std::string& line : describe_links(links, ranks, mean.step_ms)) {
    lines.push_back(std::move(line));
  }
  for (std::string& line : describe_receipts(read_receipts(dir))) lines.push_back(std::move(line));
  lines.push_back(describe_drift(ranks, rows));
  lines.push_back(advice(mean, slow, links));
  return lines;
}

}  // namespace tandem::report
