#include "engine/train/step_executor.h"

#include <algorithm>
#include <span>
#include <utility>

#include "engine/data/token_source.h"
#include "engine/model/codec_policy.h"
#include "observe/recorder.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Whether separate forward passes count the experts before a step: the auxiliary loss covers all
/// its tokens, and they need several passes.
bool counts_experts(const TrainConfig& config, int microbatches) {
  const bool has_loss = config.model.experts > 0 && config.model.aux_loss_coeff > 0;
  return has_loss && config.train.aux_loss_scope == "step" && microbatches > 1;
}

/// Whether a stage of this rank reads tokens or targets.
bool has_end_stage(const TrainConfig& config, const ParallelGroups& groups) {
  const schedule::PipelineShape shape = pipeline_shape(config);
  for (int chunk = 0; chunk < shape.chunks; ++chunk) {
    const int stage = schedule::stage_of(shape, groups.pp() ? groups.pp()->rank() : 0, chunk);
    if (stage == 0 || stage + 1 == shape.stages()) return true;
  }
  return false;
}

}  // namespace

StepExecutor::StepExecutor(const TrainConfig& config, const ParallelGroups& groups,
                           const TokenSource& source, const Sampler& sampler, ModelRanks& ranks)
    : config_(config),
      groups_(groups),
      source_(source),
      sampler_(sampler),
      ranks_(ranks),
      microbatch_(microbatch_size(config)),
      reads_text_(has_end_stage(config, groups)),
      tokens_(size_t(microbatch_ * config.train.seq)),
      targets_(tokens_.size()) {
  loader_ = share_loader(groups.world(), source, sampler, config.train.seq);
  make_pipeline(int(groups.dims().local_batch(batch(0)) / microbatch_));
}

/// No-op if there is one. Slots and links of another number of microbatches are freed first.
void StepExecutor::make_pipeline(int microbatches) {
  if (microbatches == microbatches_) return;
  schedule::PipelineShape shape = pipeline_shape(config_);
  shape.microbatches = microbatches_ = microbatches;
  pipeline_.emplace(groups_.pp(), shape, pipeline_stages(ranks_.stages()),
                    counts_experts(config_, microbatches),
                    CodecPolicy::parse(config_.parallel.codec).stages);
}

int64_t StepExecutor::targets(int64_t first) const {
  int64_t targets = 0;
  for (int64_t i = 0; i < batch(first); ++i) targets += sampler_.targets(first + i);
  return targets;
}

StepExecutor::Result StepExecutor::compute(int64_t first, int64_t targets) {
  const int64_t share = groups_.dims().local_batch(batch(first));
  make_pipeline(int(share / microbatch_));
  load(first);
  text_ = std::move(next_text_);
  load(first + batch(first));
  const Pipeline::Batch text{[this](int microbatch) { read_microbatch(microbatch); }, tokens_,
                             targets_};
  begin_step(text);
  pipeline_->run(text, 1.0f / float(targets), [this](int chunk, FlatRange range, bool is_last) {
    ShardedOptimizer& optimizer = ranks_.chunks[size_t(chunk)].optimizer;
    if (is_last || optimizer.reduces_every_pass(range)) optimizer.ready(range);
  });
  for (ModelChunk& chunk : ranks_.chunks) chunk.stage.share_load();
  Result result;
  result.squares = sum_squares();
  const double loss = pipeline_->take_loss();
  if (groups_.tp().rank() == 0) result.loss = loss;
  result.text = text_read();
  return result;
}

void StepExecutor::load(int64_t first) {
  if (std::exchange(loading_, first) == first || !reads_text_) return;
  const int64_t share = groups_.dims().local_batch(batch(first));
  const int64_t begin = first + groups_.dp().rank() * share;
  next_text_.clear();
  for (int64_t i = 0; i < share; i += microbatch_) {
    next_text_.push_back(loader_->request(begin + i, microbatch_));
  }
}

/// Ranks of a replica that have the model's first or last stage read the same samples; one of them
/// counts for all.
TextRead StepExecutor::text_read() const {
  if (!reads_text_) return {};
  uint64_t hash = 0;
  for (const auto& block : text_) hash += block->hash();
  const bool counts = groups_.tp().rank() == 0 && (!groups_.pp() || groups_.pp()->rank() == 0);
  return {counts ? hash : 0, hash, 1};
}

/// Completes the reduction of gradients.
double StepExecutor::sum_squares() {
  std::vector<SquareTerm> terms;
  for (ModelChunk& chunk : ranks_.chunks) {
    chunk.optimizer.reduce();
    const auto& of_chunk = chunk.optimizer.square_terms();
    terms.insert(terms.end(), of_chunk.begin(), of_chunk.end());
  }
  if (groups_.pp()) {
    const auto all = groups_.pp()->exchange(std::as_bytes(std::span(terms)), "squares");
    if (groups_.pp()->rank() > 0) return 0;
    terms.clear();
    for (const auto& blob : all) {
      const auto* const of_stage = reinterpret_cast<const SquareTerm*>(blob.data());
      terms.insert(terms.end(), of_stage, of_stage + blob.size() / sizeof(SquareTerm));
    }
  }
  const Squares squares = sum_terms(std::move(terms));
  return squares.sharded + (groups_.tp().rank() == 0 ? squares.replicated : 0);
}

void StepExecutor::update(const AdamStep& step) {
  for (ModelChunk& chunk : ranks_.chunks) {
    chunk.optimizer.update(step);
    chunk.stage.await_parameters([&chunk](FlatRange range) { chunk.optimizer.await(range); });
  }
  for (ModelChunk& chunk : ranks_.chunks) {
    const auto tied = chunk.stage.tied_embedding();
    const bool is_owner = tied && tied->end() <= chunk.stage.experts_end();
    if (is_owner) chunk.optimizer.await(*tied);
  }
  pipeline_->share_embedding();
  if (config_.model.router_bias_update_rate == 0) return;
  await_weights();
  for (ModelChunk& chunk : ranks_.chunks) chunk.stage.adjust_router_bias();
}

void StepExecutor::await_weights() {
  for (ModelChunk& chunk : ranks_.chunks) chunk.optimizer.await_all();
}

void StepExecutor::begin_step(const Pipeline::Batch& batch) {
  const bool whole_step = config_.train.aux_loss_scope == "step";
  for (ModelChunk& chunk : ranks_.chunks) {
    chunk.stage.begin_step(whole_step ? 1 : microbatches_);
  }
  if (!counts_experts(config_, microbatches_)) return;
  pipeline_->run_forward(batch);
  pipeline_->take_loss();
  for (ModelChunk& chunk : ranks_.chunks) chunk.stage.share_load();
}

void StepExecutor::read_microbatch(int microbatch) {
  const ScopedSpan span(SpanKind::data, "read");
  const TextBlock& text = *text_[size_t(microbatch)];
  try {
    text.await();
    std::ranges::copy(text.tokens(), tokens_.begin());
    std::ranges::copy(text.targets(), targets_.begin());
  } catch (const IoError& error) {
    ignore_text(error.what());
  }
}

void StepExecutor::verify_text(int64_t first) {
  const int64_t before = std::exchange(verified_, first);
  if (before < 0 || sampler_.ended_epochs(first) == sampler_.ended_epochs(before)) return;
  try {
    source_.verify(&groups_.world());
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
