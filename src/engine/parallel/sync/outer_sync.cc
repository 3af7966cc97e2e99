#include "engine/parallel/sync/outer_sync.h"

#include <algorithm>
#include <numeric>

#include "engine/parallel/sync/demo.h"
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

OuterSync::OuterSync(Communicator& learners, const SyncConfig& config, std::vector<Stage> stages,
                     int64_t step, LateLearners late)
    : learners_(learners.split(0, learners.rank())),
      config_(config),
      late_(std::move(late)),
      exchange_(make_exchange(config)),
      fragments_(size_t(config.num_fragments())) {
  for (const Stage& stage : stages) add_stage(stage);
  int64_t elements = 0;
  size_t max_bytes = 0;
  for (const Fragment& fragment : fragments_) {
    elements = std::max(elements, fragment.shard.elements());
    max_bytes = std::max(max_bytes, exchange_->max_bytes(fragment.shard));
    if (step > 0) continue;
    for (const Values& values : fragment.values) copy({}, values.weights, values.anchor);
  }
  changes_.resize(size_t(elements));
  if (config.is_sparse()) unsent_.resize(changes_.size());
  messages_.emplace(*learners_, "outer_sync", max_bytes, int(config.min_counted()));
  if (const auto sent = fragment_in_flight(config, step)) begin_again(*sent);
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
  if (arrives && config_.delay > 0) receive(*arrives, step - config_.delay);
  if (leaves) send(*leaves);
  if (arrives && config_.delay == 0) receive(*arrives, step);
  return arrives.has_value();
}

void OuterSync::average_weights(int64_t step) {
  messages_->end_sending();
  const bool are_equal = fragments_.size() == 1 && config_.delay == 0 && sends(step);
  if (are_equal) return;
  for (const Fragment& fragment : fragments_) {
    const auto elements = size_t(fragment.shard.elements());
    const std::span mean = std::span(changes_).first(elements);
    if (elements == 0) continue;
    for (size_t i = 0; i < fragment.values.size(); ++i) {
      const SyncSlice& slice = fragment.shard.slices[i];
      std::copy_n(fragment.values[i].weights.as<const float>(), slice.count,
                  &mean[size_t(slice.begin)]);
    }
    all_reduce(*learners_, changes_of(fragment));
    for (float& value : mean) value /= float(learners_->size());
    for (size_t i = 0; i < fragment.values.size(); ++i) {
      const SyncSlice& slice = fragment.shard.slices[i];
      std::copy_n(&mean[size_t(slice.begin)], slice.count, fragment.values[i].anchor.as<float>());
    }
  }
}

Tensor OuterSync::changes_of(const Fragment& fragment) {
  const int64_t elements = fragment.shard.elements();
  return Tensor::of(std::span(changes_).first(size_t(elements)), {elements});
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
  for (size_t i = 0; i < fragment.values.size(); ++i) {
    const Values& values = fragment.values[i];
    const SyncSlice& slice = fragment.shard.slices[i];
    float* const changes = &changes_[size_t(slice.begin)];
    if (values.gradients.data()) {
      std::copy_n(values.gradients.as<const float>(), slice.count, changes);
      continue;
    }
    const auto *weights = values.weights.as<float>(), *anchor = values.anchor.as<float>();
    for (int64_t j = 0; j < slice.count; ++j) changes[j] = anchor[j] - weights[j];
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
    auto* const unsent = fragment.values[i].unsent.as<float>();
    for (int64_t j = 0; j < slice.count; ++j) {
      unsent[j] = changes_[size_t(slice.begin + j)] += unsent[j];
    }
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
    auto* const unsent = fragment.values[i].unsent.as<float>();
    for (int64_t j = 0; j < slice.count; ++j) {
      unsent[j] = counts ? 0 : unsent[j] + changes_[size_t(slice.begin + j)];
    }
  }
}

/// Encodes the changes to this learner's message. Returns its bytes.
size_t OuterSync::encode(const Fragment& fragment, std::byte* message) {
  Tensor unsent;
  const bool has_unsent = !unsent_.empty();
  if (has_unsent) {
    const int64_t elements = fragment.shard.elements();
    unsent = Tensor::of(std::span(unsent_).first(size_t(elements)), {elements});
  }
  const auto exchange_unsent = [&](bool load) {
    for (size_t i = 0; i < fragment.values.size() && has_unsent; ++i) {
      const Tensor slice =
          unsent.narrow(0, fragment.shard.slices[i].begin, fragment.shard.slices[i].count);
      const Tensor& stored = fragment.values[i].unsent;
      load ? copy({}, stored, slice) : copy({}, slice, stored);
    }
  };
  exchange_unsent(true);
  const size_t bytes = exchange_->encode(fragment.shard, changes_of(fragment), unsent, message);
  exchange_unsent(false);
  return bytes;
}

/// Stores what the others decode, for a run that is resumed meanwhile.
void OuterSync::keep_sent(const Fragment& fragment, const std::byte* message) {
  const std::byte* const local[] = {message};
  exchange_->combine(fragment.shard, local, changes_of(fragment));
  for (size_t i = 0; i < fragment.values.size(); ++i) {
    std::copy_n(changes_.begin() + fragment.shard.slices[i].begin, fragment.shard.slices[i].count,
                fragment.values[i].sent.as<float>());
  }
}

/// Mean of what was sent, as `receive` has it of the messages.
void OuterSync::begin_again(const SentFragment& sent) {
  const Fragment& fragment = fragments_[size_t(sent.fragment)];
  const auto elements = size_t(fragment.shard.elements());
  const std::span mean = std::span(changes_).first(elements);
  std::ranges::fill(mean, 0.0f);
  has_mean_ = true;
  if (elements == 0) return;
  std::vector<float> of_learner(elements);
  for (int learner = 0; learner < learners_->size(); ++learner) {
    for (size_t i = 0; i < fragment.values.size() && learner == learners_->rank(); ++i) {
      std::copy_n(fragment.values[i].sent.as<float>(), fragment.shard.slices[i].count,
                  of_learner.begin() + fragment.shard.slices[i].begin);
    }
    broadcast(*learners_, Tensor::of(std::span(of_learner), {int64_t(elements)}), learner);
    for (size_t i = 0; i < elements; ++i) mean[i] += of_learner[i];
  }
  for (float& value : mean) value /= float(learners_->size());
}

void OuterSync::receive(int index, int64_t sent_after) {
  const Fragment& fragment = fragments_[size_t(index)];
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
  config_.is_demo() ? apply_signs(fragment) : apply(fragment);
}

/// Makes the outer step with the mean change.
void OuterSync::apply(const Fragment& fragment) {
  const ScopedSpan span(SpanKind::compute, "outer_step");
  const auto lr = float(config_.lr()), momentum = float(config_.momentum()),
             mix = float(config_.local_share());
  for (size_t i = 0; i < fragment.values.size(); ++i) {
    const Values& values = fragment.values[i];
    const SyncSlice& slice = fragment.shard.slices[i];
    auto *const weights = values.weights.as<float>(), *const anchor = values.anchor.as<float>();
    float* const velocity = values.momentum.data() ? values.momentum.as<float>() : nullptr;
    for (int64_t j = 0; j < slice.count; ++j) {
      const float mean = changes_[size_t(slice.begin + j)];
      float outer = mean;
      if (velocity) {
        velocity[j] = momentum * velocity[j] + mean;
        outer = config_.outer_nesterov ? mean + momentum * velocity[j] : velocity[j];
      }
      anchor[j] -= lr * outer;
      weights[j] = mix == 0 ? anchor[j] : mix * weights[j] + (1 - mix) * anchor[j];
    }
  }
}

void OuterSync::apply_signs(const Fragment& fragment) {
  const ScopedSpan span(SpanKind::compute, "outer_step");
  for (size_t i = 0; i < fragment.values.size(); ++i) {
    const Values& values = fragment.values[i];
    const SyncSlice& slice = fragment.shard.slices[i];
    const auto lr = float(lr_ * double(values.lr_scale));
    auto *const weights = values.weights.as<float>(), *const anchor = values.anchor.as<float>();
    for (int64_t j = 0; j < slice.count; ++j) {
      weights[j] -= lr * changes_[size_t(slice.begin + j)];
      anchor[j] = weights[j];
    }
  }
}

}  // namespace tandem
