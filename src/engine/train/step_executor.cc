#include "engine/train/step_executor.h"

#include <algorithm>
#include <span>
#include <utility>

#include "comm/flow_spans.h"
#include "engine/data/tokens/token_source.h"
#include "engine/model/codec_policy.h"
#include "observe/file_activity.h"
#include "observe/recorder.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Whether separate forward passes count the experts before a step: the auxiliary loss covers all
/// its tokens, and they need several passes, of so many microbatches of each of a rank's replicas.
bool counts_experts(const ModelConfig& model, const RunConfig& train, int microbatches,
                    int rounds) {
  const bool has_loss = model.experts > 0 && model.aux_loss_coeff > 0;
  const bool covers_step = train.aux_loss_scope == "step" || microbatches == 1;
  return has_loss && covers_step && microbatches * rounds > 1;
}

/// Whether a stage of this rank reads tokens or targets.
bool has_end_stage(const schedule::PipelineShape& shape, const ParallelGroups& groups) {
  for (int chunk = 0; chunk < shape.chunks; ++chunk) {
    const int stage = schedule::stage_of(shape, groups.pp() ? groups.pp()->rank() : 0, chunk);
    if (stage == 0 || stage + 1 == shape.stages()) return true;
  }
  return false;
}

/// Terms of all ranks.
std::vector<SquareTerm> gather_terms(Communicator& ranks, std::span<const SquareTerm> local) {
  const ScopedWait span(Phase::step_wait, "gradient_norm", -1, collective_call(ranks));
  std::vector<SquareTerm> terms;
  for (const auto& blob : ranks.exchange(std::as_bytes(local), "squares")) {
    const auto* const of_rank = reinterpret_cast<const SquareTerm*>(blob.data());
    terms.insert(terms.end(), of_rank, of_rank + blob.size() / sizeof(SquareTerm));
  }
  return terms;
}

}  // namespace

SamplerOptions make_sampler_options(const DataConfig& data,
                                    std::function<int64_t(int64_t sample)> order) {
  return {std::move(order), data.document_mask, data.packing != "none"};
}

StepExecutor::StepExecutor(const RunConfig& train, const ParallelConfig& parallel,
                           const ParallelGroups& groups, const TokenSource& source,
                           const Sampler& sampler, ModelRanks& ranks)
    : train_(train),
      parallel_(parallel),
      groups_(groups),
      source_(source),
      sampler_(sampler),
      ranks_(ranks),
      microbatch_(microbatch_size(parallel, train)),
      has_padding_(ranks.model.moe_layers() > 0 && sampler.has_padding()),
      reads_text_(sampler.document_mask() || has_padding_ ||
                  has_end_stage(pipeline_shape(parallel, train), groups)),
      tokens_(size_t(microbatch_ * train.seq)),
      targets_(tokens_.size()),
      document_starts_(sampler.document_mask() ? tokens_.size() : 0) {
  loader_ = share_loader(groups.world(), source, sampler,
                         {train.seq, microbatch_, train.batch / microbatch_});
  make_pipeline(int(groups.dims().local_batch(batch(0)) / microbatch_));
  if (groups.on_gpus()) return;
  for (ModelChunk& chunk : ranks_.chunks) {
    chunk.stage.run_between_operators([this] { progress(); });
  }
}

/// `microbatches`: of a logical replica. Slots and links of another number are freed first.
void StepExecutor::make_pipeline(int microbatches) {
  microbatches_ = microbatches;
  // Gradients of several replicas that are reduced after every pass alternate between them.
  const bool alternates = groups_.dims().rounds() > 1 && parallel_.zero == 2;
  const int of_run = alternates ? 1 : microbatches;
  if (std::exchange(pipeline_microbatches_, of_run) == of_run) return;
  schedule::PipelineShape shape = pipeline_shape(parallel_, train_);
  shape.microbatches = of_run;
  pipeline_.emplace(groups_.pp(), shape, pipeline_stages(ranks_.stages()),
                    counts_experts(ranks_.model, train_, microbatches, groups_.dims().rounds()),
                    CodecPolicy::parse(parallel_.codec).stages);
}

int64_t StepExecutor::targets(int64_t first) {
  return count_targets(first, batch(first));
}

int64_t StepExecutor::count_targets(int64_t first, int64_t samples) {
  const FileActivity reads("targets");
  int64_t targets = 0;
  try {
    for (int64_t i = 0; i < samples; ++i) targets += sampler_.targets(first + i);
  } catch (const IoError& error) {  // of a stream of shards
    ignore_text(error.what());
    return samples * train_.seq;
  }
  return targets;
}

/// Targets of this rank's learner, of `targets` in the step whose first sample is `first`.
int64_t StepExecutor::learner_targets(int64_t first, int64_t targets) {
  const ParallelDims& dims = groups_.dims();
  if (dims.learners() == 1) return targets;
  const int64_t share = batch(first) / dims.learners();
  return count_targets(first + dims.learner(groups_.world().rank()) * share, share);
}

/// Runs of the pipeline in a step: all microbatches of a logical replica after another's, or those
/// of all replicas in turn.
std::vector<StepExecutor::Run> StepExecutor::runs() const {
  std::vector<Run> runs;
  for (int first = 0; first < microbatches_; first += pipeline_microbatches_) {
    for (int round = 0; round < groups_.dims().rounds(); ++round) {
      runs.push_back({round, first, pipeline_microbatches_});
    }
  }
  return runs;
}

Pipeline::Batch StepExecutor::batch_of(const Run& run) {
  const int begin = run.round * microbatches_ + run.first;
  return {[this, begin](int microbatch) { read_microbatch(begin + microbatch); }, tokens_, targets_,
          document_starts_, has_padding_};
}

bool StepExecutor::has_replica(int round) const {
  return groups_.dims().replica(round, groups_.world().rank()) >= 0;
}

StepExecutor::Result StepExecutor::compute(int64_t first, int64_t targets) {
  const int64_t share = groups_.dims().local_batch(batch(first));
  make_pipeline(int(share / microbatch_));
  load(first);
  text_ = std::move(next_text_);
  load(first + batch(first));
  begin_step();
  Result result;
  result.targets = learner_targets(first, targets);
  run_passes(result.targets > 0 ? 1.0f / float(result.targets) : 0.0f);
  for (ModelChunk& chunk : ranks_.chunks) chunk.stage.share_load();
  result.squares = sum_squares();
  result.loss = sum_losses();
  result.text = text_read();
  return result;
}

void StepExecutor::run_passes(float scale) {
  times_ = {};
  losses_.assign(size_t(groups_.dims().rounds()), 0.0);
  const auto report = [this](int chunk, FlatRange range, bool is_last) {
    ShardedOptimizer& optimizer = ranks_.chunks[size_t(chunk)].optimizer;
    if (is_last || optimizer.reduces_every_pass(range)) optimizer.ready(range);
  };
  for (const Run& run : runs()) {
    if (!has_replica(run.round)) {
      for (ModelChunk& chunk : ranks_.chunks) chunk.optimizer.skip_pass();
      continue;
    }
    take_loss();
    pipeline_->run(batch_of(run), scale, report);
    untaken_round_ = run.round;
    const Pipeline::Times& times = pipeline_->times();
    times_.passes_s += times.passes_s;
    times_.waited_s += times.waited_s;
    times_.sent_bytes += times.sent_bytes;
  }
}

/// Adds the loss of the last pass, for which the host waits: of the step's last one once the
/// reduction of gradients is enqueued, or a GPU would be idle from its end on.
void StepExecutor::take_loss() {
  if (untaken_round_ < 0) return;
  losses_[size_t(std::exchange(untaken_round_, -1))] += pipeline_->take_loss();
}

/// Losses of this rank's replicas; on the first rank of several rounds, those of all ranks, in the
/// order of the replicas.
double StepExecutor::sum_losses() {
  take_loss();
  if (groups_.tp().rank() > 0) losses_.assign(losses_.size(), 0.0);
  if (losses_.size() == 1) return losses_[0];
  const auto all = groups_.copies().exchange(std::as_bytes(std::span(losses_)), "losses");
  if (groups_.copies().rank() > 0) return 0;
  double sum = 0;
  for (size_t round = 0; round < losses_.size(); ++round) {
    for (const auto& blob : all) sum += reinterpret_cast<const double*>(blob.data())[round];
  }
  return sum;
}

void StepExecutor::load(int64_t first) {
  if (std::exchange(loading_, first) == first || !reads_text_) return;
  const int64_t share = groups_.dims().local_batch(batch(first));
  next_text_.clear();
  for (int round = 0; round < groups_.dims().rounds() && has_replica(round); ++round) {
    const ParallelDims& dims = groups_.dims();
    const int rank = groups_.world().rank();
    const int64_t replica = dims.learner(rank) * dims.replicas() + dims.replica(round, rank);
    for (int64_t i = 0; i < share; i += microbatch_) {
      next_text_.push_back(loader_->request(first + replica * share + i, microbatch_));
    }
  }
}

/// Ranks of a replica that have the model's first or last stage read the same samples; one of them
/// counts for all.
TextRead StepExecutor::text_read() const {
  if (!reads_text_) return {};
  uint64_t hash = 0;
  for (const auto& block : text_) hash += block->hash();
  const auto is_first = [](const Communicator* axis) { return !axis || axis->rank() == 0; };
  const bool counts = is_first(&groups_.tp()) && is_first(groups_.cp()) && is_first(groups_.pp());
  return {counts ? hash : 0, hash, 1};
}

/// Completes the reduction of gradients.
std::vector<SquareTerm> StepExecutor::square_terms() {
  std::vector<SquareTerm> terms;
  for (ModelChunk& chunk : ranks_.chunks) {
    chunk.optimizer.reduce();
    const auto& of_chunk = chunk.optimizer.square_terms();
    terms.insert(terms.end(), of_chunk.begin(), of_chunk.end());
  }
  return terms;
}

double StepExecutor::sum_squares() {
  std::vector<SquareTerm> terms = square_terms();
  if (groups_.pp()) terms = gather_terms(*groups_.pp(), terms);
  const bool is_first_stage = !groups_.pp() || groups_.pp()->rank() == 0;
  const auto sum = [this](std::vector<SquareTerm> of_replica) {
    const Squares squares = sum_terms(std::move(of_replica));
    return squares.sharded + (groups_.tp().rank() == 0 ? squares.replicated : 0);
  };
  const bool has_groups =
      groups_.state_groups(kCopies).across || groups_.host_groups(kCopies).across;
  const bool is_in_order = groups_.dims().rounds() == 1 && !has_groups;
  if (is_in_order) return is_first_stage ? sum(std::move(terms)) : 0;
  // Ranks own the shards of several replicas, or of another one than their own.
  if (groups_.copies().size() > 1) terms = gather_terms(groups_.copies(), terms);
  std::vector<std::vector<SquareTerm>> by_replica(size_t(groups_.dims().num_gradients()));
  for (const SquareTerm& term : terms) by_replica[size_t(term.replica)].push_back(term);
  std::vector<double> sums;
  for (std::vector<SquareTerm>& of_replica : by_replica) sums.push_back(sum(std::move(of_replica)));
  const auto all = groups_.tp().exchange(std::as_bytes(std::span(sums)), "squares");
  const bool is_first = groups_.tp().rank() == 0 && groups_.copies().rank() == 0;
  if (!is_first || !is_first_stage) return 0;
  double total = 0;
  for (size_t replica = 0; replica < sums.size(); ++replica) {
    double of_replica = 0;
    for (const auto& blob : all) {
      of_replica += reinterpret_cast<const double*>(blob.data())[replica];
    }
    total += of_replica;
  }
  return total;
}

void StepExecutor::update(const AdamStep& step) {
  for (ModelChunk& chunk : ranks_.chunks) chunk.optimizer.update(step);
  await_in_passes();
  if (ranks_.model.router_bias_update_rate == 0) return;
  await_weights();
  for (ModelChunk& chunk : ranks_.chunks) chunk.stage.adjust_router_bias();
}

void StepExecutor::gather_weights() {
  for (ModelChunk& chunk : ranks_.chunks) chunk.optimizer.gather_weights();
  await_in_passes();
}

/// Waits for the weights that optimizers gather: for a tied embedding here, for all others in the
/// next passes.
void StepExecutor::await_in_passes() {
  for (ModelChunk& chunk : ranks_.chunks) {
    chunk.stage.await_parameters([&chunk](FlatRange range) { chunk.optimizer.await(range); });
  }
  for (ModelChunk& chunk : ranks_.chunks) {
    const auto tied = chunk.stage.tied_embedding();
    const bool is_owner = tied && tied->end() <= chunk.stage.experts_end();
    if (is_owner) chunk.optimizer.await(*tied);
  }
  pipeline_->share_embedding();
}

void StepExecutor::progress() {
  for (ModelChunk& chunk : ranks_.chunks) chunk.optimizer.progress();
}

void StepExecutor::weights_changed() {
  for (ModelChunk& chunk : ranks_.chunks) chunk.optimizer.state_changed();
  pipeline_->share_embedding();
}

void StepExecutor::await_weights() {
  for (ModelChunk& chunk : ranks_.chunks) chunk.optimizer.await_all();
}

void StepExecutor::await_slices() {
  for (ModelChunk& chunk : ranks_.chunks) chunk.optimizer.await_slices();
}

void StepExecutor::begin_step() {
  const bool whole_step = train_.aux_loss_scope == "step";
  for (ModelChunk& chunk : ranks_.chunks) {
    chunk.stage.begin_step(whole_step ? 1 : microbatches_);
  }
  if (!counts_experts(ranks_.model, train_, microbatches_, groups_.dims().rounds())) return;
  for (const Run& run : runs()) {
    if (!has_replica(run.round)) continue;
    pipeline_->run_forward(batch_of(run));
    pipeline_->take_loss();
  }
  for (ModelChunk& chunk : ranks_.chunks) chunk.stage.share_load();
}

void StepExecutor::read_microbatch(int index) {
  const ScopedSpan span(SpanKind::data, "read");
  const TextBlock& text = *text_[size_t(index)];
  try {
    text.await();
    std::ranges::copy(text.tokens(), tokens_.begin());
    std::ranges::copy(text.targets(), targets_.begin());
    std::ranges::copy(text.document_starts(), document_starts_.begin());
  } catch (const IoError& error) {
    ignore_text(error.what());
  }
}

void StepExecutor::verify_text(int64_t first) {
  const int64_t before = std::exchange(verified_, first);
  if (before < 0 || sampler_.ended_epochs(first) == sampler_.ended_epochs(before)) return;
  const FileActivity reads("verify");
  try {
    source_.verify(&groups_.world());
  } catch (const IoError& error) {
    ignore_text(error.what());
  }
}

void StepExecutor::ignore_text(const std::string& error) {
  read_error_ = error;
  std::ranges::fill(tokens_, -1);
  std::ranges::fill(targets_, -1);
  std::ranges::fill(document_starts_, 0);
}

}  // namespace tandem
