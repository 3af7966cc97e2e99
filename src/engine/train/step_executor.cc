#include "engine/train/step_executor.h"

#include <algorithm>
#include <span>

#include "engine/data/corpus.h"
#include "observe/recorder.h"
#include "tandem/error.h"

namespace tandem {

int64_t microbatch_size(const TrainConfig& config) {
  return config.train.microbatch > 0 ? config.train.microbatch
                                     : ParallelDims(config).local_batch(config.train.batch);
}

StepExecutor::StepExecutor(const TrainConfig& config, const ParallelGroups& groups,
                           const Corpus& corpus, const Sampler& sampler, Transformer& model,
                           ShardedOptimizer& optimizer)
    : config_(config),
      groups_(groups),
      corpus_(corpus),
      sampler_(sampler),
      model_(model),
      optimizer_(optimizer),
      microbatch_(microbatch_size(config)),
      tokens_(size_t(microbatch_ * config.train.seq)),
      targets_(tokens_.size()) {}

int64_t StepExecutor::targets(int64_t first) const {
  int64_t targets = 0;
  for (int64_t i = 0; i < config_.train.batch; ++i) targets += sampler_.targets(first + i);
  return targets;
}

StepExecutor::Result StepExecutor::compute(int64_t first, int64_t targets) {
  const int64_t share = groups_.dims().local_batch(config_.train.batch);
  const int64_t begin = first + groups_.dp().rank() * share;
  const auto ready = [this](FlatRange range) { optimizer_.ready(range); };
  Result result;
  count_experts(begin, share);
  for (int64_t at = 0; at < share; at += microbatch_) {
    read_microbatch(begin + at);
    model_.enqueue_forward(tokens_, targets_);
    const bool is_last = at + microbatch_ >= share;
    model_.backward(1.0f / float(targets), is_last ? ready : FlatRangeCallback());
  }
  model_.share_load();
  const ShardedOptimizer::Squares squares = optimizer_.reduce();
  const double loss = model_.take_loss();
  if (groups_.tp().rank() == 0) result.loss = loss;
  result.squares = squares.sharded + (groups_.tp().rank() == 0 ? squares.replicated : 0);
  return result;
}

void StepExecutor::update(const AdamStep& step) {
  optimizer_.update(step);
  model_.await_parameters([this](FlatRange range) { optimizer_.await(range); });
  if (config_.model.router_bias_update_rate == 0) return;
  await_weights();
  model_.adjust_router_bias();
  model_.parameters_changed();
}

void StepExecutor::await_weights() {
  optimizer_.await_all();
}

/// The auxiliary loss of a step covers all its tokens: if they need several forward passes,
/// separate passes count the experts first.
void StepExecutor::count_experts(int64_t begin, int64_t share) {
  const bool whole_step = config_.train.aux_loss_scope == "step";
  model_.begin_step(whole_step ? 1 : share / microbatch_);
  const bool has_loss = config_.model.experts > 0 && config_.model.aux_loss_coeff > 0;
  if (!has_loss || !whole_step || share == microbatch_) return;
  for (int64_t at = 0; at < share; at += microbatch_) {
    read_microbatch(begin + at);
    model_.forward(tokens_, targets_);
  }
  model_.share_load();
}

void StepExecutor::read_microbatch(int64_t sample) {
  const ScopedSpan span(SpanKind::data, "read");
  const auto seq = size_t(config_.train.seq);
  try {
    for (size_t i = 0; i < size_t(microbatch_); ++i) {
      sampler_.read(sample + int64_t(i), std::span(tokens_).subspan(i * seq, seq),
                    std::span(targets_).subspan(i * seq, seq));
    }
  } catch (const IoError& error) {
    ignore_text(error.what());
  }
}

void StepExecutor::verify_text(int64_t first) {
  if (first == 0 || sampler_.epoch(first) == sampler_.epoch(first - config_.train.batch)) {
    return;
  }
  try {
    corpus_.verify(&groups_.world());
  } catch (const IoError& error) {
    ignore_text(error.what());
  }
}

void StepExecutor::ignore_text(const std::string& error) {
  read_error_ = error;
  std::ranges::fill(tokens_, kBos);
  std::ranges::fill(targets_, -1);
}

}  // namespace tandem
