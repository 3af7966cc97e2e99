#include "engine/checkpoint/run/trained_ranks.h"

#include <algorithm>
#include <numeric>

#include "core/host_copy.h"

namespace tandem {

uint64_t TrainedRanks::bytes() const {
  uint64_t elements = 0;
  for (const Parameter& p : parameter_list()) {
    elements +=
        uint64_t(std::accumulate(p.shape.begin(), p.shape.end(), int64_t{1}, std::multiplies<>()));
  }
  const uint64_t shared = 1 + has_outer(Moment::outer_momentum);
  const uint64_t of_learner = 3 + has_outer(Moment::sent) + has_outer(Moment::unsent);
  const uint64_t copies =
      learners > 1 ? shared + uint64_t(learners) * of_learner : 3 + has_masters();
  return copies * sizeof(float) * elements;
}

const std::vector<Parameter>& TrainedRanks::parameter_list() const {
  return stages.front().model.parameter_list();
}

bool TrainedRanks::has_masters() const {
  return std::ranges::any_of(stages,
                             [](const TrainedStage& s) { return s.optimizer.has_masters(); });
}

void LiveState::for_each(size_t stage, Moment moment, const Visit& visit) const {
  constexpr int64_t kChunk = 1 << 22;  // elements of a GPU's memory in host memory at a time
  const auto& [model, optimizer] = ranks_.stages[stage];
  for (const StateSlice& slice : optimizer.slices(moment)) {
    for (int64_t at = 0; at < slice.values.elements(); at += kChunk) {
      const int64_t count = std::min(kChunk, slice.values.elements() - at);
      visit(slice.begin + at, HostCopy(model.exec(), slice.values.narrow(0, at, count)).tensor());
    }
  }
}

std::vector<Tensor> LiveState::residuals() const {
  std::vector<Tensor> all;
  for (const TrainedStage& stage : ranks_.stages) {
    for (const Tensor& residual : stage.optimizer.residuals()) all.push_back(residual);
  }
  return all;
}

}  // namespace tandem
