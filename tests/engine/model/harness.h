// Small models on any number of ranks, and the results of one step: loss, and the gradients of the
// whole model assembled from the ranks' shards.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core/host_copy.h"
#include "engine/model/transformer.h"
#include "gemm/gemm.h"
#include "kernels/elementwise.h"
#include "tandem/random.h"

namespace tandem::test {

inline ModelConfig small_model() {
  ModelConfig c;
  c.vocab = 37;
  c.hidden = 24;
  c.layers = 2;
  c.heads = 4;
  c.kv_heads = 4;
  c.head_dim = 6;
  c.ffn = 22;
  c.max_seq = 16;
  return c;
}

struct Variant {
  const char* name;
  bool tied, parallel_block;
  int64_t kv_heads;
  int64_t window = 0;  ///< of the first layer; the second has none
};
constexpr Variant kVariants[] = {{"tied", true, false, 4},
                                 {"untied_grouped", false, false, 2},
                                 {"parallel_block", true, true, 4},
                                 {"parallel_untied_grouped", false, true, 2},
                                 {"windowed", false, false, 2, 4}};
inline ModelConfig small_model(const Variant& v) {
  ModelConfig c = small_model();
  c.tie_word_embeddings = v.tied;
  c.parallel_block = v.parallel_block;
  c.kv_heads = v.kv_heads;
  c.sliding_window = v.window;
  c.full_attention_freq = v.window > 0 ? c.layers : 0;
  return c;
}

struct VariantOnRanks {
  Variant variant;
  int ranks;
};
/// Each variant on every number of tensor-parallel ranks that it can have.
inline std::vector<VariantOnRanks> variants_on_ranks() {
  std::vector<VariantOnRanks> all;
  for (const Variant& variant : kVariants) {
    for (const int ranks : {1, 2, 4}) {
      if (variant.kv_heads % ranks == 0) all.push_back({variant, ranks});
    }
  }
  return all;
}

struct Batch {
  std::vector<int32_t> tokens, targets;
};
/// Seeded tokens; every fifth target is ignored.
inline Batch make_batch(const ModelConfig& c, int64_t count, uint64_t seed = 3) {
  Batch b;
  for (int64_t i = 0; i < count; ++i) {
    const auto words = philox(seed, 1, uint64_t(i));
    b.tokens.push_back(int32_t(words[0] % uint64_t(c.vocab)));
    b.targets.push_back(i % 5 == 4 ? -1 : int32_t(words[1] % uint64_t(c.vocab)));
  }
  return b;
}

using Tensors = std::map<std::string, std::vector<float>>;

/// Copies this rank's shard `flat` to its position in the whole tensors.
inline void collect(const std::vector<Parameter>& list, std::span<const float> flat,
                    Tensors& whole) {
  for (const Parameter& p : list) {
    int64_t elements = 1;
    for (const int64_t d : p.shape) elements *= d;
    auto& out = whole[p.name];
    out.resize(size_t(elements));
    const LocalShard slice = local_shard(p);
    for (int64_t i = 0; i < slice.rows; ++i) {
      for (int64_t j = 0; j < slice.columns; ++j) {
        out[size_t(slice.first + i * slice.whole_columns + j)] =
            flat[size_t(p.offset + i * slice.row_stride + j)];
      }
    }
  }
}

struct Step {
  double loss = 0;
  Tensors gradients;
};

/// Makes the last `count` positions of each sequence padding.
inline void pad(Batch& batch, int64_t seq, int64_t count) {
  for (size_t i = 0; i < batch.tokens.size(); ++i) {
    if (int64_t(i) % seq >= seq - count) batch.tokens[i] = batch.targets[i] = -1;
  }
}

/// One forward and backward pass on `comm`; the gradients are this rank's shards. `starts`: of
/// documents. `targets`: instead of the batch's, if there are any. `padding`: as of `pad`.
inline Step run_step(Communicator& comm, const ModelConfig& config,
                     const TransformerOptions& options, float init_scale = 5,
                     const std::vector<int32_t>& starts = {},
                     const std::vector<int32_t>& targets = {}, int64_t padding = 0) {
  set_kernel_threads(1);
  Transformer model(comm, config, options);
  model.initialize(17);
  // Larger weights than a fresh model's, so that attention and SwiGLU are far from linear.
  const HostCopy weights(model.exec(), model.parameters());
  for (float& w : weights.values()) w = w == 1 ? w : w * init_scale;
  weights.store();
  model.parameters_changed();
  Batch batch = make_batch(config, options.batch * options.seq);
  if (!targets.empty()) batch.targets = targets;
  pad(batch, options.seq, padding);
  if (!starts.empty()) model.set_documents(starts);
  Step step;
  step.loss = model.forward(batch.tokens, batch.targets);
  model.backward(1.0f / float(batch.tokens.size()));
  step.loss += model.take_loss();  // with head_rows
  collect(model.parameter_list(), read_f32(model.exec(), model.gradients()), step.gradients);
  return step;
}

/// Runs one step on all ranks that `run` gives its argument, and assembles the gradients; every
/// rank must report the same loss.
using RunRanks = std::function<void(const std::function<void(Communicator&)>&)>;
inline Step run_on(const RunRanks& run, const ModelConfig& config,
                   const TransformerOptions& options, const std::vector<int32_t>& starts = {},
                   const std::vector<int32_t>& targets = {}, int64_t padding = 0) {
  Step all;
  std::mutex mutex;
  run([&](Communicator& comm) {
    Step local = run_step(comm, config, options, 5, starts, targets, padding);
    const std::lock_guard lock(mutex);
    if (all.gradients.empty()) {
      all = local;
      return;
    }
    EXPECT_EQ(all.loss, local.loss);
    for (auto& [name, values] : local.gradients) {
      auto& whole = all.gradients[name];
      for (size_t i = 0; i < values.size(); ++i) {
        if (values[i] != 0) whole[i] = values[i];  // other ranks' elements are 0 here
      }
    }
  });
  return all;
}

inline Step run_on_threads(int ranks, const ModelConfig& config, const TransformerOptions& options,
                           const std::vector<int32_t>& starts = {}) {
  WorldOptions world;
  world.ranks = ranks;
  return run_on([&](const auto& body) { run_threads(world, body); }, config, options, starts);
}

/// |a - b| / |b| over all tensors.
inline double difference(const Tensors& a, const Tensors& b) {
  double squares = 0, size = 0;
  EXPECT_EQ(a.size(), b.size());
  for (const auto& [name, values] : b) {
    const auto found = a.find(name);
    if (found == a.end() || found->second.size() != values.size()) {
      ADD_FAILURE() << name << " is missing or has another size";
      return INFINITY;
    }
    for (size_t i = 0; i < values.size(); ++i) {
      const double d = double(found->second[i]) - double(values[i]);
      squares += d * d;
      size += double(values[i]) * double(values[i]);
    }
  }
  return std::sqrt(squares / size);
}

}  // namespace tandem::test
