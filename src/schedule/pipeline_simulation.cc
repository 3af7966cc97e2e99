#include "schedule/pipeline_simulation.h"

#include <algorithm>
#include <optional>

namespace tandem::schedule {
namespace {

/// End times of the passes that others wait for.
class Ends {
 public:
  Ends(const PipelineShape& shape, const PassCosts& costs)
      : shape_(shape),
        costs_(costs),
        forward_(size_t(shape.stages()) * size_t(shape.microbatches)),
        backward_(forward_.size()) {}

  /// Time at which the outputs that the pass needs have arrived; none if one is not known.
  std::optional<double> ready(int rank, const PipelineAction& action) const {
    const int stage = stage_of(shape_, rank, action.chunk);
    const std::optional<double> local =
        (action.pass == PassKind::backward_weight ? backward_ : forward_)[index(stage, action)];
    switch (action.pass) {
      case PassKind::forward:
        return stage == 0 ? 0 : arrival(forward_, rank, stage - 1, action);
      case PassKind::backward:
      case PassKind::backward_input: {
        if (stage + 1 == shape_.stages() || !local) return local;
        const std::optional<double> next = arrival(backward_, rank, stage + 1, action);
        return next ? std::max(*next, *local) : next;
      }
      case PassKind::backward_weight:
        return local;
    }
    return {};
  }
  void set(int rank, const PipelineAction& action, double end) {
    if (action.pass == PassKind::backward_weight) return;
    (action.pass == PassKind::forward
         ? forward_
         : backward_)[index(stage_of(shape_, rank, action.chunk), action)] = end;
  }

 private:
  using Times = std::vector<std::optional<double>>;
  size_t index(int stage, const PipelineAction& action) const {
    return size_t(stage) * size_t(shape_.microbatches) + size_t(action.microbatch);
  }
  std::optional<double> arrival(const Times& ends, int rank, int stage,
                                const PipelineAction& action) const {
    const std::optional<double> end = ends[index(stage, action)];
    if (!end || position_of(shape_, stage).rank == rank) return end;
    return *end + costs_.transfer;
  }

  PipelineShape shape_;
  PassCosts costs_;
  Times forward_, backward_;
};

int peak_of(const std::vector<PipelineAction>& actions) {
  int stored = 0, peak = 0;
  for (const PipelineAction& action : actions) {
    if (action.pass == PassKind::forward) peak = std::max(peak, ++stored);
    if (action.pass == PassKind::backward || action.pass == PassKind::backward_weight) --stored;
  }
  return peak;
}

}  // namespace

double PassCosts::of(PassKind pass) const {
  switch (pass) {
    case PassKind::forward:
      return forward;
    case PassKind::backward:
      return recompute + backward_input + backward_weight;
    case PassKind::backward_input:
      return recompute + backward_input;
    case PassKind::backward_weight:
      return backward_weight;
  }
  return 0;
}

PipelineTimes simulate(const PipelineShape& shape,
                       const std::vector<std::vector<PipelineAction>>& actions,
                       const PassCosts& costs) {
  PipelineTimes times;
  times.passes.resize(actions.size());
  Ends ends(shape, costs);
  for (bool advances = true; advances;) {
    advances = false;
    for (size_t rank = 0; rank < actions.size(); ++rank) {
      std::vector<PassTime>& passes = times.passes[rank];
      while (passes.size() < actions[rank].size()) {
        const PipelineAction& action = actions[rank][passes.size()];
        const std::optional<double> ready = ends.ready(int(rank), action);
        if (!ready) break;
        const double begin = std::max(*ready, passes.empty() ? 0 : passes.back().end);
        passes.push_back({begin, begin + costs.of(action.pass)});
        ends.set(int(rank), action, passes.back().end);
        advances = true;
      }
    }
  }
  double all_busy = 0;
  for (size_t rank = 0; rank < actions.size(); ++rank) {
    const std::vector<PassTime>& passes = times.passes[rank];
    times.peak_activations.push_back(peak_of(actions[rank]));
    if (passes.empty()) continue;
    double busy = 0;
    for (const PassTime& pass : passes) busy += pass.end - pass.begin;
    all_busy += busy;
    times.makespan = std::max(times.makespan, passes.back().end);
    const double span = passes.back().end - passes.front().begin;
    if (span > 0) times.inner_bubble = std::max(times.inner_bubble, 1 - busy / span);
  }
  const double time = double(actions.size()) * times.makespan;
  if (time > 0) times.bubble = std::max(1 - all_busy / time, 0.0);  // not -0.0 by rounding
  return times;
}

double published_bubble_time(const PipelineShape& shape, const PassCosts& costs) {
  const double forward = costs.forward, input = costs.of(PassKind::backward_input),
               weight = costs.backward_weight, others = shape.ranks - 1;
  switch (shape.kind) {
    case PipelineKind::gpipe:
    case PipelineKind::one_f_one_b:
    case PipelineKind::interleaved:
      return others * (forward + input + weight);
    case PipelineKind::zb_h1:
      return others * (forward + input - weight);
    case PipelineKind::zb_v:
      return others * forward;
    case PipelineKind::dualpipe_v:
      return others * (forward + 2 * input - weight);
  }
  return 0;
}

double published_bubble(const PipelineShape& shape, const PassCosts& costs) {
  const double idle = published_bubble_time(shape, costs);
  const double busy =
      (costs.forward + costs.of(PassKind::backward)) * shape.microbatches * shape.chunks;
  return idle / (busy + idle);
}

}  // namespace tandem::schedule
