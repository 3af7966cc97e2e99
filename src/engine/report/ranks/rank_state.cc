#include "engine/report/ranks/rank_state.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "core/median.h"
#include "engine/report/ranks/rank_rows.h"

namespace tandem::report {
namespace {

using Json = nlohmann::ordered_json;

double rounded(double value) {
  return std::round(value * 1e3) / 1e3;
}

/// Medians of a stage's ranks: own work, then by phase.
struct StageMedians {
  double work = 0;
  PhaseTimes phases{};
};

std::map<int, StageMedians> stage_medians(std::span<const RankHistory> ranks,
                                          const std::vector<RankFrame>& latest) {
  std::map<int, std::vector<size_t>> stages;
  for (size_t i = 0; i < ranks.size(); ++i) stages[ranks[i].position.pp].push_back(i);
  std::map<int, StageMedians> medians;
  for (const auto& [stage, members] : stages) {
    std::vector<double> values;
    for (const size_t i : members) values.push_back(total_work(latest[i]));
    medians[stage].work = upper_median(values);
    for (size_t phase = 0; phase < kPhases; ++phase) {
      values.clear();
      for (const size_t i : members) values.push_back(latest[i].phases[phase]);
      medians[stage].phases[phase] = upper_median(values);
    }
  }
  return medians;
}

}  // namespace

RankFrame latest_frame(const RankHistory& history) {
  constexpr size_t kLatest = 4;
  const size_t count = std::min(kLatest, history.frames.size());
  RankFrame mean;
  if (count == 0) return mean;
  for (size_t i = history.frames.size() - count; i < history.frames.size(); ++i) {
    const RankFrame& frame = history.frames[i];
    mean.step_ms += frame.step_ms / double(count);
    for (size_t phase = 0; phase < kPhases; ++phase) {
      mean.phases[phase] += frame.phases[phase] / double(count);
    }
  }
  mean.step = history.frames.back().step;
  return mean;
}

Json rank_state(std::span<const RankHistory> ranks, const RunGoal& goal, const SentBytes& sent) {
  std::vector<RankFrame> latest;
  for (const RankHistory& history : ranks) latest.push_back(latest_frame(history));
  const auto medians = stage_medians(ranks, latest);
  Json rank = Json::array(), tp = rank, cp = tp, dp = tp, pp = tp, host = tp, work = tp, phase = tp,
       step = tp, step_ms = tp;
  Json hosts = Json::array(), phases = Json::array(), shares = Json::array(), ms = Json::array();
  std::map<std::string, size_t> host_numbers;
  PhaseTimes sums{};
  double all_ms = 0;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const RankPosition& position = ranks[i].position;
    const StageMedians& usual = medians.at(position.pp);
    const auto [at, is_new] = host_numbers.try_emplace(position.host, host_numbers.size());
    if (is_new) hosts.push_back(position.host);
    rank.push_back(position.rank);
    tp.push_back(position.tp);
    cp.push_back(position.cp.value_or(0));
    dp.push_back(position.dp);
    pp.push_back(position.pp);
    host.push_back(at->second);
    work.push_back(rounded(usual.work > 0 ? total_work(latest[i]) / usual.work : 1));
    size_t largest = 0;
    for (size_t p = 0; p < kPhases; ++p) {
      const auto excess = [&](size_t of) { return latest[i].phases[of] - usual.phases[of]; };
      if (is_work(Phase(p)) && excess(p) > excess(largest)) largest = p;
      sums[p] += latest[i].phases[p];
    }
    all_ms += latest[i].step_ms;
    phase.push_back(largest);
    step.push_back(latest[i].step);
    step_ms.push_back(rounded(latest[i].step_ms));
  }
  for (size_t p = 0; p < kPhases; ++p) {
    phases.push_back(name_of(Phase(p)));
    shares.push_back(all_ms > 0 ? sums[p] / all_ms : 0);
    Json of_phase = Json::array();
    for (size_t i = 0; i < ranks.size() && sums[p] > 0; ++i) {
      of_phase.push_back(rounded(latest[i].phases[p]));
    }
    ms.push_back(std::move(of_phase));
  }
  return {{"ranks",
           {{"rank", std::move(rank)},
            {"tp", std::move(tp)},
            {"cp", std::move(cp)},
            {"dp", std::move(dp)},
            {"pp", std::move(pp)},
            {"host", std::move(host)},
            {"work", std::move(work)},
            {"phase", std::move(phase)},
            {"step", std::move(step)},
            {"step_ms", std::move(step_ms)}}},
          {"hosts", std::move(hosts)},
          {"phases", std::move(phases)},
          {"shares", std::move(shares)},
          {"ms", std::move(ms)},
          {"ep", goal.ep},
          {"learners", goal.learners},
          {"link", goal.link_bytes_per_s > 0 ? Json{{"bytes_per_s", goal.link_bytes_per_s},
                                                    {"latency_s", goal.link_latency_s}}
                                             : Json()},
          {"sent", sent.json(ranks.size())}};
}

}  // namespace tandem::report
