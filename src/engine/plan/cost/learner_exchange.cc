#include "engine/plan/cost/learner_exchange.h"

#include <algorithm>

#include "engine/model/layout.h"
#include "engine/parallel/sync/outer_sync.h"
#include "engine/plan/cost/rank_state.h"

namespace tandem::plan {

LearnerExchanges::LearnerExchanges(const ModelConfig& model, const SyncConfig& sync) : sync_(sync) {
  if (sync_.num_learners() == 1) return;
  const ModelLayout layout(model, 1, 0);
  std::vector<SyncShard> fragments(size_t(sync_.num_fragments()));
  FragmentSlices(layout.parameters, sync_.num_fragments()).add({0, layout.size}, fragments);
  const auto exchange = make_exchange(sync_);
  double parameters = 0;
  for (const SyncShard& shard : fragments) {
    const auto bytes = double(exchange->max_bytes(shard));
    parameters += double(shard.elements());
    bytes_ = std::max(bytes_, bytes);
    all_bytes_ += bytes;
  }
  const ExchangeBytes of_rank = exchange_bytes(sync_, fragments);
  changes_ = of_rank.changes / parameters;
  messages_ = of_rank.messages / parameters;
  scratch_ = of_rank.scratch;
  bytes_ /= parameters;
  all_bytes_ /= parameters;
}

LearnerExchange LearnerExchanges::of(const RunRow& row, const GpuSpec& gpu) const {
  const auto learners = double(sync_.num_learners());
  if (learners == 1) return {};
  const RankWeights weights = rank_weights(row);
  const WeightCopies copies = weight_copies(row);
  const double owned = weights.dense / copies.dense + weights.experts / copies.experts;
  const double moments = sizeof(float) * double(outer_moments(sync_).size());
  LearnerExchange exchange;
  exchange.memory_bytes =
      owned * (moments + changes_ + messages_) +
      std::min(scratch_ / double(row.tp), owned * changes_);  // at most as many arrays
  exchange.sent_bytes = owned * bytes_ * (learners - 1);
  exchange.seconds = exchange.sent_bytes / gpu.learner_rate;
  exchange.step_bytes = owned * all_bytes_ * (learners - 1) / double(sync_.period());
  return exchange;
}

double LearnerExchanges::exposed_seconds(const LearnerExchange& exchange, double step) const {
  if (sync_.num_learners() == 1) return 0;
  const double hidden = double(sync_.delay) * step;
  return std::max(0.0, exchange.seconds - hidden) * double(sync_.num_fragments()) /
         double(sync_.period());
}

}  // namespace tandem::plan
