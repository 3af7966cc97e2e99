#include "engine/parallel/sync/outer_sync.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "comm/exec.h"
#include "engine/parallel/sync/demo.h"
#include "kernels/elementwise.h"
#include "kernels/outer_step.h"
#include "observe/recorder.h"
#include "tandem/collectives.h"

namespace tandem {

std::vector<Moment> outer_moments(const SyncConfig& config) {
  if (config.num_learners() == 1) return {};
  std::vector<Moment> moments{Moment::anchor};
  if (config.momentum() > 0) moments.push_back(Moment::outer_momentum);
  if (config.delay > 0) moments.push_back(Moment::sent);
  const bool leaves_out = (config.is_sparse() && !config.is_demo()) || config.has_quorum();
  if (leaves_out) moments.push_back(Moment::unsent);
  return moments;
}

ExchangeBytes exchange_bytes(const SyncConfig& config, std::span<const SyncShard> fragments) {
  const auto exchange = make_exchange(config);
  const double arrays = config.is_sparse() ? 2 : 1;
  ExchangeBytes bytes;
  size_t message = 0;
  for (const SyncShard& shard : fragments) {
    bytes.changes = std::max(bytes.changes, arrays * sizeof(float) * double(shard.elements()));
    bytes.scratch = std::max(bytes.scratch, double(exchange->scratch_bytes(shard)));
    message = std::max(message, exchange->max_bytes(shard));
  }
  bytes.messages = double(LearnerMessages::buffer_bytes(int(config.num_learners()), message));
  return bytes;
}

OuterSync::OuterSync(Communicator& learners, const SyncConfig& config, std::vector<Stage> stages,
                     int64_t step, LateLearners late)
    : learners_(learners.split(0, learners.rank())),
      exec_(make_exec(*learners_)),
      config_(config),
      late_(std::move(late)),
      stages_(std::move(stages)),
      exchange_(make_exchange(config, exec_)),
      fragments_(size_t(config.num_fragments())),
      fence_(exec_) {
  for (const Stage& stage : stages_) add_stage(stage);
  int64_t elements = 0;
  size_t max_bytes = 0;
  for (const Fragment& fragment : fragments_) {
    elements = std::max(elements, fragment.shard.elements());
    max_bytes = std::max(max_bytes, exchange_->max_bytes(fragment.shard));
    exchange_->prepare(fragment.shard);
  }
  changes_ = Memory(size_t(elements) * sizeof(float), exec_.device);
  if (config.is_sparse()) unsent_ = Memory(changes_.bytes(), exec_.device);
  messages_.emplace(*learners_, "outer_sync", max_bytes, int(config.min_counted()));
  await_steps();
  for (const Fragment& fragment : fragments_) {
    if (step > 0) break;
    for (const Values& values : fragment.values) copy(exec_, values.weights, values.anchor);
  }
  if (const auto sent = fragment_in_flight(config, step)) begin_again(*sent);
  let_steps_await();
}

/// Work enqueued from now on starts after that of the steps so far.
void OuterSync::await_steps() {
  for (const Stage& stage : stages_) {
    for (const Exec& exec : stage.execs()) {
      fence_.record(exec);
      fence_.await(exec_);
    }
  }
}

/// Steps enqueued from now on start after the work so far.
void OuterSync::let_steps_await() {
  fence_.record(exec_);
  for (const Stage& stage : stages_) {
    for (const Exec& exec : stage.execs()) fence_.await(exec);
  }
}

std::vector<Exec> OuterSync::Stage::execs() const {
  std::vector<Exec> all = optimizer.update_execs();
  all.push_back(exec);
  return all;
}

void OuterSync::add_stage(const Stage& stage) {
  const FragmentSlices slices(stage.list, config_.num_fragments());
  const auto find = [&stage](Moment moment) { return stage.optimizer.slices(moment); };
  const std::vector<StateSlice> weights = find(Moment::weights), anchors = find(Moment::anchor),
                                momenta = find(Moment::outer_momentum), sent = find(Moment::sent),
                                unsent = find(config_.is_demo() ? kDemoUnsent : Moment::unsent),
                                gradients = config_.is_demo() ? find(kDemoGradients)
                                                              : std::vector<StateSlice>();
  // In the order of the flat array, so that what is adjacent there is in a message, too.
  std::vector<size_t> runs(weights.size());
  std::iota(runs.begin(), runs.end(), size_t{0});
  std::ranges::sort(runs, {}, [&weights](size_t run) { return weights[run].begin; });
  for (const size_t run : runs) {
    const FlatRange range{weights[run].begin, weights[run].values.elements()};
    for (const auto& [flat, index, slice] : slices.in(range)) {
      const auto narrow = [&, begin = flat - range.begin,
                           count = slice.count](const std::vector<StateSlice>& all) {
        return all.empty() ? Tensor() : all[run].values.narrow(0, begin, count);
      };
      Fragment& fragment = fragments_[size_t(index)];
      fragment.shard.add(slice);
      fragment.values.push_back({narrow(weights), narrow(anchors), narrow(momenta), narrow(sent),
                                 narrow(unsent), narrow(gradients),
                                 stage.list[slice.parameter].lr_scale});
    }
  }
}

bool OuterSync::after_update(int64_t step, double lr) {
  lr_ = lr;
  const auto arrives = fragment_due(config_, step - config_.delay);
  const auto leaves = fragment_due(config_, step);
  await_steps();
  if (arrives && config_.delay > 0) receive(*arrives, step - config_.delay);
  if (leaves) send(*leaves);
  if (arrives && config_.delay == 0) receive(*arrives, step);
  let_steps_await();
  return arrives.has_value();
}

void OuterSync::average_weights(int64_t step) {
  messages_->end_sending();
  const bool are_equal = fragments_.size() == 1 && config_.delay == 0 && sends(step);
  if (are_equal) return;
  await_steps();
  for (const Fragment& fragment : fragments_) {
    if (fragment.values.empty()) continue;
    const Tensor mean = changes_of(fragment);
    load(fragment, &Values::weights, mean);
    all_reduce(*learners_, mean);
    divide(exec_, mean, float(learners_->size()));
    store(fragment, mean, &Values::anchor);
  }
  let_steps_await();
}

Tensor OuterSync::changes_of(const Fragment& fragment) const {
  return changes_.view(DType::f32, {fragment.shard.elements()});
}

/// Elements of slice `index` of a fragment's `values`.
Tensor OuterSync::slice_of(const Fragment& fragment, size_t index, const Tensor& values) {
  const SyncSlice& slice = fragment.shard.slices[index];
  return values.narrow(0, slice.begin, slice.count);
}

/// Copies a fragment's slices to an array of its elements.
void OuterSync::load(const Fragment& fragment, Tensor Values::*from, const Tensor& to) const {
  for (size_t i = 0; i < fragment.values.size(); ++i) {
    copy(exec_, fragment.values[i].*from, slice_of(fragment, i, to));
  }
}

void OuterSync::store(const Fragment& fragment, const Tensor& from, Tensor Values::*to) const {
  for (size_t i = 0; i < fragment.values.size(); ++i) {
    copy(exec_, slice_of(fragment, i, from), fragment.values[i].*to);
  }
}

void OuterSync::send(int index) {
  const Fragment& fragment = fragments_[size_t(index)];
  has_mean_ = false;
  if (fragment.values.empty()) return;  // no message, thus no round: none would answer
  std::byte* const message = messages_->begin_round();
  size_t bytes = 0;
  {
    const ScopedSpan span(SpanKind::compute, "encode_changes", index);
    find_changes(fragment);
    add_unsent(fragment);
    bytes = encode(fragment, message);
    if (fragment.values.front().sent.data()) keep_sent(fragment, message);
  }
  config_.delay == 0 ? messages_->send(bytes) : messages_->send_in_steps(bytes);
}

void OuterSync::find_changes(const Fragment& fragment) {
  const Tensor changes = changes_of(fragment);
  if (config_.is_demo()) return load(fragment, &Values::gradients, changes);
  for (size_t i = 0; i < fragment.values.size(); ++i) {
    const Values& values = fragment.values[i];
    subtract(exec_, values.anchor, values.weights, slice_of(fragment, i, changes));
  }
}

/// Whether a message has all of the slice's changes; what a sparse one leaves out, it adds to later
/// ones.
bool OuterSync::is_sent_whole(const SyncSlice& slice) const {
  return !config_.is_sparse() || !slice.sharded;
}

/// Before a round with a quorum: adds earlier changes that did not count, and notes all that is
/// sent as unsent until it counts.
void OuterSync::add_unsent(const Fragment& fragment) {
  for (size_t i = 0; i < fragment.values.size() && config_.has_quorum(); ++i) {
    const SyncSlice& slice = fragment.shard.slices[i];
    if (!is_sent_whole(slice)) continue;
    const Tensor changes = slice_of(fragment, i, changes_of(fragment));
    const Tensor& unsent = fragment.values[i].unsent;
    sum(exec_, std::array{changes, unsent}, changes);
    copy(exec_, changes, unsent);
  }
}

/// After a round with a quorum: what counted is sent, what did not is unsent.
void OuterSync::settle_unsent(const Fragment& fragment, bool counts) {
  if (!config_.has_quorum()) return;
  if (!counts) {
    const std::byte* const local[] = {messages_->local()};
    exchange_->combine(fragment.shard, local, changes_of(fragment));
  }
  for (size_t i = 0; i < fragment.values.size(); ++i) {
    const SyncSlice& slice = fragment.shard.slices[i];
    if (is_sent_whole(slice) != counts) continue;  // as `add_unsent` or `encode` has left it
    const Tensor& unsent = fragment.values[i].unsent;
    if (counts) {
      clear(exec_, unsent);
    } else {
      sum(exec_, std::array{unsent, slice_of(fragment, i, changes_of(fragment))}, unsent);
    }
  }
}

/// Encodes the changes to this learner's message. Returns its bytes.
size_t OuterSync::encode(const Fragment& fragment, std::byte* message) {
  const Tensor changes = changes_of(fragment);
  if (!config_.is_sparse()) return exchange_->encode(fragment.shard, changes, {}, message);
  const Tensor unsent = unsent_.view(DType::f32, {changes.elements()});
  load(fragment, &Values::unsent, unsent);
  const size_t bytes = exchange_->encode(fragment.shard, changes, unsent, message);
  store(fragment, unsent, &Values::unsent);
  return bytes;
}

/// Stores what the others decode, for a run that is resumed meanwhile.
void OuterSync::keep_sent(const Fragment& fragment, const std::byte* message) {
  const std::byte* const local[] = {message};
  exchange_->combine(fragment.shard, local, changes_of(fragment));
  store(fragment, changes_of(fragment), &Values::sent);
}

/// Mean of what was sent, as `receive` has it of the messages.
void OuterSync::begin_again(const SentFragment& sent) {
  const Fragment& fragment = fragments_[size_t(sent.fragment)];
  has_mean_ = true;
  if (fragment.values.empty()) return;
  const Tensor mean = changes_of(fragment);
  const Memory memory(mean.bytes(), exec_.device);
  const Tensor of_learner = memory.view(DType::f32, {mean.elements()});
  for (int learner = 0; learner < learners_->size(); ++learner) {
    if (learner == learners_->rank()) load(fragment, &Values::sent, of_learner);
    broadcast(*learners_, of_learner, learner);
    std::vector<Tensor> terms{of_learner};
    if (learner > 0) terms.insert(terms.begin(), mean);
    sum(exec_, terms, mean);
  }
  divide(exec_, mean, float(learners_->size()));
  wait(exec_);  // the memory is freed
}

void OuterSync::receive(int index, int64_t sent_after) {
  const Fragment& fragment = fragments_[size_t(index)];
  counted_.clear();
  if (fragment.values.empty()) return;
  if (has_mean_) {
    settle_unsent(fragment, true);
  } else {
    const auto late = late_ ? std::optional(late_(sent_after)) : std::nullopt;
    const std::vector<const std::byte*> messages = messages_->receive(index, late);
    const ScopedSpan span(SpanKind::compute, "decode_changes", index);
    settle_unsent(fragment, std::ranges::find(messages_->counted(), learners_->rank()) !=
                                messages_->counted().end());
    exchange_->combine(fragment.shard, messages, changes_of(fragment));
  }
  counted_ = messages_->counted();
  for (const Stage& stage : stages_) stage.optimizer.flush();  // weights may still leave
  config_.is_demo() ? apply_signs(fragment) : apply(fragment);
}

/// Makes the outer step with the mean change.
void OuterSync::apply(const Fragment& fragment) {
  const ScopedSpan span(SpanKind::compute, "outer_step");
  const OuterConstants step{float(config_.lr()), float(config_.momentum()), config_.outer_nesterov,
                            float(config_.local_share())};
  const Tensor mean = changes_of(fragment);
  for (size_t i = 0; i < fragment.values.size(); ++i) {
    const Values& values = fragment.values[i];
    outer_step(exec_, step, slice_of(fragment, i, mean),
               {values.weights, values.anchor, values.momentum});
  }
}

void OuterSync::apply_signs(const Fragment& fragment) {
  const ScopedSpan span(SpanKind::compute, "outer_step");
  const Tensor signs = changes_of(fragment);
  for (size_t i = 0; i < fragment.values.size(); ++i) {
    const Values& values = fragment.values[i];
    const auto lr = float(lr_ * double(values.lr_scale));
    step_along(exec_, slice_of(fragment, i, signs), lr, values.weights);
    copy(exec_, values.weights, values.anchor);
  }
}

}  // namespace tandem
