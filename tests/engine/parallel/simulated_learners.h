// Learners simulated in one process with plain loops over whole arrays, a thread each.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/model/parameter_patterns.h"
#include "engine/optim/learning_rate.h"
#include "engine/parallel/sharded/parameter_slices.h"
#include "engine/train/model_ranks.h"
#include "engine/train/step_executor.h"
#include "kernels/dct.h"
#include "tests/codec/topk_reference.h"
#include "tests/engine/data/open_configured.h"
#include "tests/engine/train/layouts.h"

namespace tandem {

using Tensors = std::map<std::string, std::vector<float>>;

inline Tensors make_tensors(std::span<const Parameter> list, std::span<const float> flat) {
  Tensors tensors;
  ParameterSlices(list).for_each({0, int64_t(flat.size())}, [&](const ParameterSlice& slice) {
    const Parameter& p = list[slice.parameter];
    std::vector<float>& values = tensors[p.name];
    values.resize(size_t(p.shape[0] * (p.shape.size() > 1 ? p.shape[1] : 1)));
    std::copy_n(flat.begin() + slice.flat, slice.count, values.begin() + slice.whole);
  });
  return tensors;
}

struct Learners {
  Tensors initial, anchor;
  std::vector<Tensors> weights;  ///< by learner
  std::vector<double> losses;    ///< of each step
};

/// A learner's arrays; all have the same flat layout, of one rank.
struct Simulated {
  std::vector<float> initial, weights, anchor, momentum, sent, unsent;
  std::vector<float> late;      ///< sent whole, and did not count
  std::vector<bool> is_sparse;  ///< sent in a sparse message
  std::vector<std::byte> message;
  std::vector<double> losses;
};

class Simulation {
 public:
  /// `forgets`: sparse messages are not subtracted from what is still to be sent, a control.
  /// `loses`: neither is what a late learner has sent added to its next message.
  Simulation(const TrainRequest& request, bool forgets = false, bool loses = false)
      : config_(request.config),
        sync_(config_.parallel.sync),
        learners_(int(sync_.learners)),
        forgets_(forgets),
        loses_(loses),
        faults_(request.faults),
        source_(open_configured(config_)),
        all_(size_t(learners_)) {
    config_.parallel.sync = {};
    config_.parallel.dp = 1;
    config_.train.batch /= learners_;
  }

  /// Bytes of a sparse message of all weights, after `run`.
  double message_bytes() const {
    std::vector<Parameter> list = list_;
    std::ranges::sort(list, {}, &Parameter::offset);
    int64_t bytes = 0, adjacent = 0;
    for (const Parameter& p : list) {
      const Matrix matrix(p);
      const auto count = int64_t(matrix.elements());
      if (!p.sharding.over_tp()) {
        bytes += 4 * count + sync_.sparse().bytes(std::exchange(adjacent, 0));
      } else if (sync_.is_demo()) {
        bytes += sync_.sparse(matrix.tiles(sync_).elements()).bytes(count);
      } else {
        adjacent += count;
      }
    }
    return double(bytes + sync_.sparse().bytes(adjacent));
  }

  Learners run() {
    WorldOptions options;
    options.ranks = learners_;
    run_threads(options, [this](Communicator& world) { train_learner(world); });
    Learners result{make_tensors(list_, all_[0].initial),
                    make_tensors(list_, all_[0].anchor),
                    {},
                    std::vector<double>(all_[0].losses.size())};
    for (const Simulated& s : all_) {
      EXPECT_EQ(s.anchor, all_[0].anchor);
      result.weights.push_back(make_tensors(list_, s.weights));
      for (size_t i = 0; i < s.losses.size(); ++i) result.losses[i] += s.losses[i] / learners_;
    }
    return result;
  }

 private:
  void train_learner(Communicator& world) {
    const int learner = world.rank();
    const auto alone = world.split(learner, 0);
    const ParallelGroups groups(*alone, ParallelDims(1, 1), config_.model.experts > 0);
    const int64_t share = config_.train.batch;
    const Sampler sampler(
        *source_, config_.train.seq, uint64_t(config_.train.seed),
        make_sampler_options(config_.data, [this, share, learner](int64_t sample) {
          return sample / share * share * learners_ + learner * share + sample % share;
        }));
    ModelRanks ranks(groups, config_, {});
    StepExecutor executor(config_.train, config_.parallel, groups, *source_, sampler, ranks);
    Stage& stage = ranks.chunks.front().stage;
    ShardedOptimizer& optimizer = ranks.chunks.front().optimizer;
    stage.initialize(uint64_t(config_.train.seed));
    optimizer.adopt_weights(stage.parameter_staging());
    stage.end_staging();
    executor.weights_changed();
    Simulated& local = all_[size_t(learner)];
    local.weights.resize(size_t(stage.weights().elements()));
    for (auto* zeros : {&local.momentum, &local.sent, &local.unsent, &local.late}) {
      zeros->resize(local.weights.size());
    }
    local.is_sparse.resize(local.weights.size());
    copy_weights(optimizer, local.weights, true);
    local.initial = local.anchor = local.weights;
    if (learner == 0) {
      list_ = stage.parameter_list();
      apply_patterns(config_.optimizer.no_decay, config_.optimizer.lr_scale, list_);
    }
    world.barrier();  // all read the list
    for (int64_t step = 0; step < config_.train.steps; ++step) {
      const int64_t first = step * share;
      const StepExecutor::Result result = executor.compute(first, executor.targets(first));
      local.losses.push_back(result.loss / double(executor.targets(first)));
      const double lr = learning_rate(config_.optimizer, config_.train, step, 0, 0);
      const auto update = AdamStep::make(config_.optimizer, step, lr, std::sqrt(result.squares));
      if (sync_.is_demo()) {
        decay_and_send(local, update, optimizer.reduced_gradients());
        world.barrier();
        follow_signs(local, update);
      } else {
        executor.update(update);
        executor.await_weights();
        copy_weights(optimizer, local.weights, true);
        world.barrier();
        exchange(world, local, step + 1);
      }
      world.barrier();
      copy_weights(optimizer, local.weights, false);
      executor.gather_weights();
    }
    executor.await_weights();
  }

  static void copy_weights(const ShardedOptimizer& optimizer, std::vector<float>& flat, bool out) {
    for (const StateSlice& slice : optimizer.slices(Moment::weights)) {
      float* const values = slice.values.as<float>();
      for (int64_t i = 0; i < slice.values.elements(); ++i) {
        float& to = flat[size_t(slice.begin + i)];
        out ? to = values[i] : values[i] = to;
      }
    }
  }

  /// Steps after which the fragment is sent.
  bool sends(int fragment, int64_t step) const {
    const int64_t offset = fragment * sync_.every / sync_.num_fragments();
    return step > 0 && (step - offset) % sync_.every == 0;
  }

  void exchange(Communicator& world, Simulated& local, int64_t step) {
    const std::vector<int> fragment_of = assign_fragments(list_, sync_.num_fragments());
    for (int fragment = 0; fragment < sync_.num_fragments(); ++fragment) {
      std::vector<size_t> elements;
      ParameterSlices(list_).for_each({0, int64_t(local.weights.size())},
                                      [&](const ParameterSlice& slice) {
                                        if (fragment_of[slice.parameter] != fragment) return;
                                        for (int64_t i = 0; i < slice.count; ++i)
                                          elements.push_back(size_t(slice.flat + i));
                                      });
      if (sync_.delay > 0 && sends(fragment, step - sync_.delay)) {
        outer_step(local, elements, step - sync_.delay);
      }
      if (sends(fragment, step)) {
        for (const size_t i : elements) {
          local.sent[i] = local.anchor[i] - local.weights[i] + local.late[i];
          local.late[i] = 0;
        }
        if (sync_.is_sparse()) make_sparse(local, fragment, fragment_of);
      }
      world.barrier();
      if (sync_.delay == 0 && sends(fragment, step)) outer_step(local, elements, step);
      world.barrier();
    }
  }

  /// Whether faults make the learner late in the exchange that begins after a step.
  bool is_late(const Simulated& learner, int64_t step) const {
    const std::vector<Fault> faults = faults_.at(step);
    return std::ranges::any_of(faults, [&](const Fault& fault) {
      return fault.kind == FaultKind::late_message && &learner == &all_[size_t(fault.rank)];
    });
  }

  void outer_step(Simulated& local, const std::vector<size_t>& elements, int64_t sent_after) const {
    const auto lr = float(sync_.lr()), momentum = float(sync_.momentum()),
               mix = float(sync_.local_share());
    std::vector<const Simulated*> counted;
    for (const Simulated& s : all_) {
      if (!is_late(s, sent_after)) counted.push_back(&s);
    }
    const bool is_carried = is_late(local, sent_after) && !loses_;
    for (const size_t i : elements) {
      float mean = 0;
      for (const Simulated* s : counted) mean += s->sent[i];
      mean /= float(counted.size());
      if (is_carried) (local.is_sparse[i] ? local.unsent[i] : local.late[i]) += local.sent[i];
      float& v = local.momentum[i];
      v = momentum * v + mean;
      local.anchor[i] -= lr * (momentum > 0 && sync_.outer_nesterov ? mean + momentum * v : v);
      local.weights[i] =
          sync_.delay == 0 ? local.anchor[i] : mix * local.weights[i] + (1 - mix) * local.anchor[i];
    }
  }

  /// Replaces what the fragment sends by what sparse messages of it hold: one of adjacent
  /// parameters that are sharded.
  void make_sparse(Simulated& local, int fragment, const std::vector<int>& fragment_of) const {
    std::vector<size_t> segment;
    const auto end_segment = [&] {
      std::vector<float> rest;
      for (const size_t i : segment) {
        rest.push_back(local.unsent[i] * float(sync_.decay()) + local.sent[i]);
        local.sent[i] = 0;
      }
      const test::SparseReference reference{sync_.sparse()};
      const auto message = reference.encode(rest);
      for (const auto& [index, value] : reference.decode(message, int64_t(segment.size()))) {
        local.sent[segment[size_t(index)]] = value;
      }
      for (size_t i = 0; i < segment.size(); ++i) {
        local.unsent[segment[i]] = rest[i];
        local.is_sparse[segment[i]] = true;
      }
      segment.clear();
    };
    ParameterSlices(list_).for_each({0, int64_t(local.sent.size())},
                                    [&](const ParameterSlice& slice) {
                                      if (fragment_of[slice.parameter] != fragment) return;
                                      if (!list_[slice.parameter].sharding.over_tp())
                                        return end_segment();
                                      for (int64_t i = 0; i < slice.count; ++i)
                                        segment.push_back(size_t(slice.flat + i));
                                    });
    end_segment();
  }

  /// DeMo's first half: whole parameters, whose message is the learner's for the second.
  void decay_and_send(Simulated& local, const AdamStep& update,
                      const std::vector<StateSlice>& gradients) const {
    std::vector<float> scaled(local.weights.size());
    for (const StateSlice& slice : gradients) {
      for (int64_t i = 0; i < slice.values.elements(); ++i) {
        scaled[size_t(slice.begin + i)] = slice.values.as<float>()[i];
      }
    }
    local.message.clear();
    for (const Parameter& p : list_) {
      const Matrix matrix(p);
      const float lr = update.lr * p.lr_scale;
      const std::span values = std::span(scaled).subspan(size_t(p.offset), matrix.elements());
      for (float& value : values) value = lr * update.gradient_scale * value;
      if (p.decay) {
        for (float& w : std::span(local.weights).subspan(size_t(p.offset), matrix.elements())) {
          w *= 1 - lr * update.weight_decay;
        }
      }
      std::vector<std::byte> message(std::as_bytes(values).begin(), std::as_bytes(values).end());
      if (p.sharding.over_tp()) message = send_cosines(local, p, values);
      local.message.insert(local.message.end(), message.begin(), message.end());
    }
  }

  std::vector<std::byte> send_cosines(Simulated& local, const Parameter& p,
                                      std::span<float> values) const {
    const DctTiles tiles = Matrix(p).tiles(sync_);
    const auto count = int64_t(values.size());
    std::vector<float> cosines(values.size());
    dct_forward({}, tiles, 1, Tensor::of(values, {count}), Tensor::of(std::span(cosines), {count}));
    const std::span unsent = std::span(local.unsent).subspan(size_t(p.offset), values.size());
    for (size_t i = 0; i < cosines.size(); ++i) cosines[i] += unsent[i] * float(sync_.decay());
    std::vector<float> rest = cosines;
    const auto message = test::SparseReference{sync_.sparse(tiles.elements())}.encode(rest);
    std::ranges::copy(forgets_ ? cosines : rest, unsent.begin());
    return message;
  }

  /// DeMo's second half.
  void follow_signs(Simulated& local, const AdamStep& update) const {
    std::vector<const std::byte*> from;
    for (const Simulated& s : all_) from.push_back(s.message.data());
    for (const Parameter& p : list_) {
      const std::vector<float> mean = mean_of(p, from);
      for (size_t i = 0; i < mean.size(); ++i) {
        const float sign = mean[i] > 0 ? 1.0f : mean[i] < 0 ? -1.0f : 0.0f;
        local.weights[size_t(p.offset) + i] -= update.lr * p.lr_scale * sign;
      }
    }
    local.anchor = local.weights;
  }

  std::vector<float> mean_of(const Parameter& p, std::vector<const std::byte*>& from) const {
    const size_t count = Matrix(p).elements();
    std::vector<float> mean(count), senders(count);
    for (const std::byte*& message : from) {
      if (!p.sharding.over_tp()) {
        for (size_t i = 0; i < count; ++i, message += sizeof(float)) {
          float value;
          std::memcpy(&value, message, sizeof value);
          mean[i] += value;
          senders[i] += 1;
        }
        continue;
      }
      const auto topk = sync_.sparse(Matrix(p).tiles(sync_).elements());
      const auto bytes = size_t(topk.bytes(int64_t(count)));
      const std::vector<std::byte> all(message, message + bytes);
      for (const auto& [i, value] : test::SparseReference{topk}.decode(all, int64_t(count))) {
        mean[size_t(i)] += value;
        senders[size_t(i)] += 1;
      }
      message += bytes;
    }
    for (size_t i = 0; i < count; ++i) mean[i] /= std::max(senders[i], 1.0f);
    if (!p.sharding.over_tp()) return mean;
    std::vector<float> values(count);
    dct_inverse({}, Matrix(p).tiles(sync_), Tensor::of(std::span(mean), {int64_t(count)}),
                Tensor::of(std::span(values), {int64_t(count)}));
    return values;
  }

  struct Matrix {
    int64_t rows, columns;
    explicit Matrix(const Parameter& p)
        : rows(p.shape.size() > 1 ? p.shape[0] : 1), columns(p.shape.back()) {}
    size_t elements() const { return size_t(rows * columns); }
    DctTiles tiles(const SyncConfig& sync) const {
      return DctTiles::of(rows, columns, sync.tile_side());
    }
  };

  TrainConfig config_;
  const SyncConfig sync_;
  const int learners_;
  const bool forgets_, loses_;
  const FaultPlan faults_;
  const std::unique_ptr<const TokenSource> source_;
  std::vector<Simulated> all_;
  std::vector<Parameter> list_;
};

}  // namespace tandem
